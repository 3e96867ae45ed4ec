"""Batches as dictionaries of columns, message logs that hold their tokens, and environments that step many conversations at
once: what those bring along who come from NeMo RL (nemo_rl/environments/interfaces.py states the protocol).

`ratchet.experience.rollouts` plays over it; `environment: {kind: message_log}` trains with it.
"""

from ratchet.experience.interop.batched import BatchedDataDict
from ratchet.experience.interop.environment import EnvironmentInterface, EnvironmentReturn
from ratchet.experience.interop.generation import WithSampling
from ratchet.experience.interop.specs import (
    DatumSpec,
    GenerationDatumSpec,
    GenerationInterface,
    GenerationOutputSpec,
    MessageLog,
    collate,
)
from ratchet.experience.interop.tokens import TokenizerType, make_datum

__all__ = [
    "BatchedDataDict",
    "DatumSpec",
    "EnvironmentInterface",
    "EnvironmentReturn",
    "GenerationDatumSpec",
    "GenerationInterface",
    "GenerationOutputSpec",
    "MessageLog",
    "TokenizerType",
    "WithSampling",
    "collate",
    "make_datum",
]
