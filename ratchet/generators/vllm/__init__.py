"""vLLM as a generator, with weights pushed to its workers."""
