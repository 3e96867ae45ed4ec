"""The algorithms (GRPO, PPO, DPO, ...) as data: passes, advantage estimator and loss terms."""
