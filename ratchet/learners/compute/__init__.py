"""The forward passes of learners: micro-batching, chunked log-probabilities, FLOP counting."""
