"""Reporting of a run: metrics, logs, trackers, warnings."""
