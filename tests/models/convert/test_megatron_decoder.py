"""Shapes of families that Megatron runs and the built-in decoder does not, without Megatron."""

from __future__ import annotations

import json

import pytest
import torch

from ratchet.config.model_shape.megatron_decoder import read_megatron_decoder
from ratchet.errors import ModelError
from ratchet.learners.config import MegatronConfig
from ratchet.learners.distributed.checks import check_megatron
from ratchet.models.convert.stacked_experts import stack_block
from ratchet.models.parallel.megatron_sizes import MegatronSizes
from ratchet.models.transformers.policy import TransformersPolicy
from ratchet.protocols import Shard


def _hf(directory):
    return json.loads((directory / "config.json").read_text())


def test_shapes_are_read_and_written_back(written):
    qwen = read_megatron_decoder(_hf(written("qwen2_moe-dense-first")), {"eos_token_id": [7, 8]})
    assert (qwen.qkv_bias, qwen.renormalise, qwen.tied, qwen.dense_layers) == (
        False,
        True,
        True,
        (0,),
    )
    assert (qwen.shared_intermediate_size, qwen.has_shared_gate, qwen.rotary_dim) == (36, True, 8)
    assert qwen.to_hf() == {**_hf(written("qwen2_moe-dense-first")), "eos_token_id": [7, 8]}
    glm = read_megatron_decoder(_hf(written("glm4_moe")))
    assert (glm.qkv_bias, glm.qk_norm, glm.has_sigmoid_router, glm.rotary_dim) == (*[True] * 3, 4)
    assert (glm.shared_intermediate_size, glm.routed_scale, glm.dense_layers) == (48, 2.5, (0,))


@pytest.mark.parametrize(
    ("model", "changes"),
    [
        ("gpt_oss", {}),
        ("deepseek_v3", {}),
        ("qwen2_moe", {"use_sliding_window": True}),
        ("qwen2_moe", {"hidden_act": "gelu"}),
        ("glm4_moe", {"quantization_config": {"quant_method": "fp8"}}),
        ("glm4_moe", {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}),
    ],
)
def test_what_megatron_lacks_has_no_shape(written, model, changes):
    assert read_megatron_decoder({**_hf(written(model)), **changes}) is None


@pytest.mark.needs("megatron")
def test_a_model_without_layers_of_megatron_is_refused_by_name(written):
    with pytest.raises(ModelError, match=r"\(gpt_oss\). Set learner.kind=dtensor"):
        check_megatron(MegatronConfig(), TransformersPolicy.load(written("gpt_oss")))
    policy = TransformersPolicy.load(written("qwen2_moe"))
    check_megatron(MegatronConfig(expert_parallel=2, data_parallel=2), policy)
    with pytest.raises(ModelError, match="4 experts: set it to 2"):
        check_megatron(MegatronConfig(expert_parallel=3, data_parallel=3), policy)


def test_shared_experts_that_ranks_cannot_divide_are_refused(written):
    shape = read_megatron_decoder(
        {**_hf(written("qwen2_moe")), "shared_expert_intermediate_size": 37}
    )
    with pytest.raises(ModelError, match="37 columns of shared experts: set it to 1"):
        MegatronSizes(tensor=2, sequence=True).check(shape)


def test_blocks_of_experts_lie_where_transformers_stacks_them(written, weights):
    stacked = dict(TransformersPolicy.load(written("qwen2_moe")).canonical_weights())
    for name, tensor in weights("qwen2_moe").items():
        half = len(tensor) // 2
        block = Shard(name, tuple(tensor.shape), (half, *(0,) * (tensor.dim() - 1)), tensor[half:])
        found = stack_block(block, 4)
        assert found.shape == stacked[found.name].shape
        at = zip(found.offsets, found.tensor.shape, strict=True)
        assert torch.equal(stacked[found.name][tuple(slice(a, a + n) for a, n in at)], found.tensor)
