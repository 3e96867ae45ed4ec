"""Checkpoint formats: sharded weights, optimizer state and the manifest that makes a save
atomic."""
