"""Attempts of external agents, which call the policy through a local OpenAI chat API.

The server samples each answer from the policy and records the exact tokens
(docs/black-box-agents.md).

`schema` reads and writes the API's JSON, `server` serves it, `session` turns requests into
trajectories, `agents` runs the user's function or program, and `player` plays attempts with it.
"""
