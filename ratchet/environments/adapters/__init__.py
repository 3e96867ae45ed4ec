"""Adapters for environments of other libraries: Gymnasium, gem, verifiers."""
