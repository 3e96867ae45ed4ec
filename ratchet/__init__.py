"""Ratchet: post-training of language models by reinforcement learning, one path from a laptop to a cluster.

`import ratchet` is light: public names load their modules on first use, and torch with them only where needed.
"""
