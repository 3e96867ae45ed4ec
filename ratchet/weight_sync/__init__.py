"""The weight sync from a learner to its generators: a version counts once it is verified."""
