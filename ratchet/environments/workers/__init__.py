"""Environments in worker processes of their own."""
