"""Environments on HTTP servers of other libraries: NeMo Gym, Open Reward Standard."""
