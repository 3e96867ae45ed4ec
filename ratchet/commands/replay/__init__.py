"""`ratchet replay` and `ratchet explain`: a recorded step is computed again."""
