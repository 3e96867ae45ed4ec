"""Hugging Face weight files, canonical weight names, and the layout of weights in shards."""
