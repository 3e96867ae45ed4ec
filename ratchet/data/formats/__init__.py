"""Readers of file formats and of data hubs."""
