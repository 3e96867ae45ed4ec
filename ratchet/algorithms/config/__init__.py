"""Configuration of the algorithms and of their parts.

It imports no torch, so that checking a recipe does not load torch.
"""
