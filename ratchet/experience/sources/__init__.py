"""Where a step's groups come from: rows, rollouts, a curriculum, a replay buffer."""
