"""Published datasets and benchmarks by name."""
