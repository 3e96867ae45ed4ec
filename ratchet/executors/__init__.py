"""Executors run components in this process, in local processes, under Ray or under torchrun."""
