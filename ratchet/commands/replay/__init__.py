"""`ratchet replay` and `ratchet explain`, which compute recorded steps again."""
