"""Rewards: functions that judge a finished attempt."""
