"""Reward functions that were written for TRL, verl or OpenRLHF, run unchanged."""
