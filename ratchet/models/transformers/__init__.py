"""Models that the transformers library runs."""
