"""The reward for programs, judged by tests in the sandbox."""
