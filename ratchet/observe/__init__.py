"""What a run reports: metrics, logs, trackers, warnings."""
