"""The inputs of probes follow the model that they are for."""

from types import SimpleNamespace
from typing import Any

import torch

from ratchet.models.transformers.probe import ProbeInputs


def test_a_probe_runs_where_the_model_has_moved():
    """A division by tensor parallelism moves the model to the device between two probes."""
    inputs = ProbeInputs.from_rows([torch.arange(3), torch.arange(2)])
    policy: Any = SimpleNamespace(model=SimpleNamespace(device=torch.device("meta")))
    policy.hidden = lambda tokens, positions, lengths: (tokens, positions, lengths)
    tokens, positions, lengths = inputs.run(policy)
    assert {tokens.device.type, positions.device.type} == {"meta"}
    assert lengths == (3, 2)
