"""From tasks to training groups: rollouts, data sources, asynchronous scheduling and checks."""
