"""Models of Megatron Core. Importing anything of this package makes `megatron.core` importable
first: see `ready`."""

from ratchet.models.megatron.patches import make_ready

make_ready()
