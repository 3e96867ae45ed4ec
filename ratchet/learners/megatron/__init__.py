"""A learner by Megatron Core. Importing anything of this package makes `megatron.core` importable
first."""

from ratchet.models import megatron as megatron
