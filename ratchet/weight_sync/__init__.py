"""Weight sync from a learner to its generators, checked before it counts."""
