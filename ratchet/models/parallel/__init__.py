"""Models divided over ranks: tensor, context and expert parallelism."""
