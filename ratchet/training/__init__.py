"""One training run: the loop, its components, colocation, checkpoints and stages."""
