"""Models of a run that judge attempts, each with a place of its own in the cluster."""
