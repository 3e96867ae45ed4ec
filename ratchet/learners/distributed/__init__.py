"""The learners over several processes: FSDP2, tensor, context, pipeline, expert parallelism."""
