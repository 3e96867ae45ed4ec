"""Forward passes: micro-batching, chunked log-probabilities and FLOP counting."""
