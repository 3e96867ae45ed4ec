"""Advantage estimators (GRPO, RLOO, GAE, ...) and transforms of advantages (normalise, clip)."""
