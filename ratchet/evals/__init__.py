"""Evaluation: estimators, intervals, paired tests and early stopping."""
