"""The vLLM generator: weight syncs load the learner's weights into vLLM's workers."""
