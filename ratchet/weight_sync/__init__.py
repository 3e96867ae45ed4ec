"""The weight sync from a learner to its generators: push, verify and commit new weights."""
