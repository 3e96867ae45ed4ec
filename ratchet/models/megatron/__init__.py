"""Run models of Megatron Core.

Importing any module of this package first makes `megatron.core` importable, see
`patches.make_ready`.
"""

from ratchet.models.megatron.patches import make_ready

make_ready()
