"""Checks that look at several keys of a recipe together."""
