"""The learner that uses Megatron Core.

Importing any module of this package first makes `megatron.core` importable.
"""

from ratchet.models import megatron as megatron
