"""The optimizers and learning-rate schedules."""
