"""Configuration of the algorithms and of their parts.

It imports no torch, so that a recipe is checked without loading it.
"""
