"""The memory of an accelerator, by hand: micro-batches, the KV cache, and what is said when none is
left."""

import asyncio

import pytest
import torch
from learners.test_local import ALGORITHMS, learner, prepared

from ratchet.config.model_shape.presets import get_preset
from ratchet.learners.compute.forward import Forward
from ratchet.learners.config import DTensorConfig, LocalConfig
from ratchet.learners.device_memory import (
    StageModels,
    count_room,
    count_token_bytes,
    count_update_bytes,
    size_micro_batches,
)
from ratchet.models.flops import DecoderCost

GIB = 2**30
H200 = 139 * GIB
QWEN3 = {
    "0.6B": get_preset("qwen3-0.6b", 151936),
    "1.7B": get_preset("qwen3-1.7b", 151936),
    "4B": get_preset(
        "qwen3-1.7b",
        151936,
        hidden_size=2560,
        n_layers=36,
        n_heads=32,
        intermediate_size=9728,
    ),
}
# GiB: 0.92 x 139 less 16 bytes a parameter, and 4 a matrix entry of the layers. Bytes of a token: 4
# for each number that a layer keeps (27,648; 40,960; 64,000), and two hidden states.
BY_HAND = {
    "0.6B": (596_049_920, 440_401_920, 117.4, 28 * 4 * 27_648 + 8 * 1024, 16384),
    "1.7B": (1_720_574_976, 1_409_286_144, 97.0, 28 * 4 * 40_960 + 8 * 2048, 8192),
    "4B": (4_022_468_096, 3_633_315_840, 54.4, 36 * 4 * 64_000 + 8 * 2560, 2048),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_a_model_on_an_h200(name):
    n_parameters, n_matrix, room_gib, token_bytes, tokens = BY_HAND[name]
    cost, section = DecoderCost(QWEN3[name]), LocalConfig()
    models = StageModels(cost, cost.parameters, cost.parameters)
    assert (cost.parameters, cost.count_layer_matrices()) == (n_parameters, n_matrix)
    assert count_room(section, models, H200) / GIB == pytest.approx(room_gib, abs=0.1)
    assert count_token_bytes(section, cost) == token_bytes
    sized = size_micro_batches(section, models, H200)
    assert sized == LocalConfig(micro_batch_tokens=tokens)
    # Twice as many tokens would take more than half of the room.
    assert tokens * token_bytes <= room_gib / 2 * GIB
    assert tokens == 16384 or 2 * tokens * token_bytes > room_gib / 2 * GIB
    # All together: weights, gradients and moments, the engine's copy, and the update's memory.
    state = 16 * n_parameters + 2 * n_matrix
    update = count_update_bytes(sized, cost, "cuda", longest=512)
    assert update == tokens * token_bytes + 3 * 256 * 2**20 + 2 * n_matrix
    kv = 0.92 * H200 - state - update
    assert kv / GIB > 35
    assert count_update_bytes(sized, cost, "cuda", longest=2 * tokens) > update


def test_other_models_and_smaller_accelerators_leave_less():
    cost = DecoderCost(QWEN3["1.7B"])

    def size(n_models=1, n_trained=1, device_gib=139, **keys):
        section = LocalConfig(**keys) if "dp_shard" not in keys else DTensorConfig(**keys)
        models = StageModels(cost, n_models * cost.parameters, n_trained * cost.parameters)
        return size_micro_batches(section, models, device_gib * GIB).micro_batch_tokens

    assert size() == 8192
    assert size(n_models=3, n_trained=2) == 4096
    assert size(device_gib=80) == 4096
    assert size(device_gib=40) == 512
    assert size(device_gib=24) == 512  # does not fit at all, and the error says so
    assert size(device_gib=40, dp_shard=8) == 2048
    assert size(device_gib=40, activation_checkpointing=True) == 4096
    assert size(micro_batch_tokens=3000) == 3000


def test_an_update_without_memory_names_the_key(monkeypatch):
    def fail(*arguments, **options):
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139 GiB"
        )

    made = learner(LocalConfig(micro_batch_tokens=20))
    batch, terms = prepared(ALGORITHMS["sft"])
    monkeypatch.setattr(Forward, "forward_backward", fail)
    message = (
        r"^CUDA out of memory. Tried to allocate 2.00 GiB, in an update by micro-batches of up to "
        r"\d+ tokens. Lower learner.micro_batch_tokens or generator.kv_cache_gib"
    )
    with pytest.raises(torch.OutOfMemoryError, match=message):
        asyncio.run(made.update(batch, terms))
