"""Environments whose tasks are rows of a dataset."""
