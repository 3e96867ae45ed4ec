"""Checkpoint formats: sharded weights, optimizer state, and the manifest of a complete save."""
