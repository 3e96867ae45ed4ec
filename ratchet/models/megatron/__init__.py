"""Run models of Megatron Core.

Importing any module of this package first makes `megatron.core` importable, see
`patches.prepare_import`.
"""

from ratchet.models.megatron.patches import prepare_import

prepare_import()
