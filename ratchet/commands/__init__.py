"""The work of each command; `ratchet.cli` only parses its options."""
