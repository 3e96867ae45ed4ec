"""The last import of a server of forks: a collection of garbage in a fork would traverse, and so
copy, what the server has imported."""

import gc

gc.collect()
gc.freeze()
