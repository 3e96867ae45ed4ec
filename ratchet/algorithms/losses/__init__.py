"""The losses: pure functions on packed tensors, each with its equation and source."""
