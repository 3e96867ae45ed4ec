"""Attempts of external agents, which call the policy through a local server.

The server speaks OpenAI's APIs, Anthropic Messages and vLLM's additions. It samples each answer
from the policy and records the exact tokens (docs/black-box-agents.md).

`schema` reads chat requests; `anthropic` and `responses` read those of the other dialects as chat
requests. `server` and `routes` serve them, `replies` answers in the form of each API, `session`
turns requests into trajectories, `agents` runs the user's function or program, and `player` plays
attempts with it.
"""
