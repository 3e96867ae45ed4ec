"""The vLLM generator, whose workers receive the learner's weights by pushes."""
