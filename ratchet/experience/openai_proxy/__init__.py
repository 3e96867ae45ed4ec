"""Attempts of an agent that is a black box: it speaks the OpenAI chat API to a local server, which
answers from the policy and keeps the exact tokens. docs/black-box-agents.md

`wire` reads and writes the API's JSON, `session` turns requests into trajectories, `server` serves,
`agents` runs somebody's function or program, and `player` makes attempts of it all.
"""
