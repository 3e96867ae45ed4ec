"""Learners over several processes: FSDP2, tensor, context, pipeline and expert parallelism."""
