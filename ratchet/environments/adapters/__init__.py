"""Adapters for environments of other libraries: Gymnasium, gem, TRL, verifiers."""
