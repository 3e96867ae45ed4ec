"""Attempts of external agents, which call the policy through a local OpenAI chat API.

The server answers from the policy and keeps the exact tokens. docs/black-box-agents.md

`schema` reads and writes the API's JSON, `session` turns requests into trajectories, `server`
serves, `agents` runs the user's function or program, and `player` makes attempts of them.
"""
