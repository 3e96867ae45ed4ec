"""Environments whose answers are programs."""
