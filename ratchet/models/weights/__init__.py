"""Canonical weight names and the layout of weights in shards."""
