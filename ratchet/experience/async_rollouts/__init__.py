"""Rollouts ahead of their training step: staleness bounds, concurrency and interruption."""
