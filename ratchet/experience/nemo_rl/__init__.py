"""Compatibility with NeMo RL: batches as dictionaries, message logs, batched environments.

The environment protocol is defined in NeMo RL's nemo_rl/environments/interfaces.py. Message logs
hold their tokens, and an environment steps many conversations at once.

`ratchet.experience.nemo_rl.rollouts` plays such environments, and the recipe section
`environment: {kind: message_log}` trains with them.
"""

from ratchet.experience.nemo_rl.batched_data_dict import BatchedDataDict
from ratchet.experience.nemo_rl.environment import (
    ActorEnvironment,
    EnvironmentInterface,
    EnvironmentReturn,
)
from ratchet.experience.nemo_rl.generation import WithSampling
from ratchet.experience.nemo_rl.packed_tensor import PackedTensor
from ratchet.experience.nemo_rl.policy_generation import PolicyGeneration
from ratchet.experience.nemo_rl.specs import (
    DatumSpec,
    GenerationDatumSpec,
    GenerationInterface,
    GenerationOutputSpec,
    MessageLog,
    collate,
)
from ratchet.experience.nemo_rl.tokens import TokenizerType, make_datum

__all__ = [
    "ActorEnvironment",
    "BatchedDataDict",
    "DatumSpec",
    "EnvironmentInterface",
    "EnvironmentReturn",
    "GenerationDatumSpec",
    "GenerationInterface",
    "GenerationOutputSpec",
    "MessageLog",
    "PackedTensor",
    "PolicyGeneration",
    "TokenizerType",
    "WithSampling",
    "collate",
    "make_datum",
]
