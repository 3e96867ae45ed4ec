"""Checks of rollouts: log-probability parity with the learner, and reward hacking."""
