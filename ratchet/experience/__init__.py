"""Training groups from tasks: rollouts, data sources, asynchronous scheduling and checks."""
