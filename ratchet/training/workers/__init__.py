"""Start the processes of generators, rollouts and judges, and build the component of each."""
