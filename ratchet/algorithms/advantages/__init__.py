"""Advantage estimators and what is done to their results."""
