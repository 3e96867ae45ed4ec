"""Rows of data: reading, ordering, filtering, tokenizing and packing them."""
