"""One attempt, and groups of attempts, played in an environment."""
