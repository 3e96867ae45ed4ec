"""What each command does; `ratchet.cli` only parses its options."""
