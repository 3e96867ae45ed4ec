"""Run upstream's own unit tests on Ratchet, through modules of upstream's names."""
