"""Checks of experience: log-probability parity with the learner, reward hacking."""
