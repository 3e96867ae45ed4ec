"""The losses: pure functions on packed tensors, each with its equation and its source."""
