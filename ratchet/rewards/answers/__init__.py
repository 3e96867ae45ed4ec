"""Rewards that compare an answer with the expected one."""
