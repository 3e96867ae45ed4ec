"""Rewards by a language model behind an HTTP API."""
