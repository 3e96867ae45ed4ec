"""The sources of a step's groups: rows, rollouts, a curriculum, a replay buffer."""
