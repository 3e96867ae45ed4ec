"""Where components run: in this process, in local processes, under Ray or under torchrun."""
