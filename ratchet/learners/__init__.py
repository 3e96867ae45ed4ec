"""The learners: they hold trainable weights, compute token columns and apply updates."""
