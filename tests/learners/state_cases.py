"""What ranks with optimizer states of another kind than AdamW's do in tests."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from learners.spread_cases import SHAPE, made, micros_of, weighed

from ratchet.errors import CheckpointError
from ratchet.learners.config import DTensorConfig
from ratchet.learners.distributed.mesh import Mesh
from ratchet.learners.distributed.topology import Topology
from ratchet.learners.optim import adamw_8bit

SMALLER = replace(SHAPE, intermediate_size=SHAPE.intermediate_size // 2)


def goes_on(rank, directory, optimizer):
    """Three steps, and the same with a checkpoint after the second, from which another learner goes
    on, and a smaller model does not."""
    adamw_8bit.MIN_QUANTISED_SIZE = 64
    mesh = Mesh(Topology(shards=2), "cpu")
    whole, resumed = (
        made(mesh, SHAPE, torch.float32, DTensorConfig(dp_shard=2), optimizer=optimizer)
        for _ in range(2)
    )
    for step in range(3):
        batch, terms = weighed(step)
        micros = [micro.batch for micro in micros_of(mesh, batch, terms)]
        whole.update(micros, terms)
        if step == 1:
            whole.save(Path(directory))
            resumed.load(Path(directory))
        if step == 2:
            resumed.update(micros, terms)
    states = [learner.optimizer.state for learner in (whole, resumed)]
    same = [
        torch.equal(a.local, b.local) for a, b in zip(whole.trained, resumed.trained, strict=True)
    ]
    same += [
        torch.equal(kept, states[1][name][key])
        for name, state in states[0].items()
        for key, kept in state.items()
    ]
    keys = {name: sorted(state) for name, state in states[0].items()}
    smaller = made(mesh, SMALLER, torch.float32, DTensorConfig(dp_shard=2), optimizer=optimizer)
    with pytest.raises(CheckpointError) as caught:
        smaller.load(Path(directory))
    return {"keys": keys, "same": same, "refusal": str(caught.value)}
