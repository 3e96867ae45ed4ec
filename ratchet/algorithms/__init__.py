"""Algorithms as data: the passes, the advantage estimator and the loss terms that make up GRPO
and the others."""
