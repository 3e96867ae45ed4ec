"""Shapes of families that Megatron runs and the built-in decoder does not, without Megatron."""

from __future__ import annotations

import json
import math

import pytest
import torch

from ratchet.config.lora import LoRAConfig
from ratchet.config.model_shape.megatron_decoder import (
    REQUIRED_KEYS,
    ClampedGLU,
    LatentHeads,
    SinkAttentionShape,
    explain_missing_layers,
    read_megatron_decoder,
)
from ratchet.errors import ConfigError, ModelError
from ratchet.learners.config import MegatronConfig
from ratchet.learners.distributed.checks import check_megatron
from ratchet.models.convert.packed_experts import pack_blocks, read_single_experts
from ratchet.models.convert.stacked_experts import stack_block
from ratchet.models.parallel.megatron_sizes import MegatronSizes
from ratchet.models.transformers.policy import TransformersPolicy
from ratchet.protocols import Shard

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.5,
}


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


def test_shapes_of_families_with_another_attention(written):
    oss = read_megatron_decoder(_hf(written("gpt_oss")))
    assert (oss.sinks, oss.clamped_glu) == (SinkAttentionShape(5, (0, 2)), ClampedGLU(0.5, 1.702))
    assert (oss.qkv_bias, oss.out_bias, oss.expert_intermediate_size, oss.rotary_dim) == (
        True,
        True,
        48,
        8,
    )
    # What a config.json of an older transformers leaves out.
    short = {key: _hf(written("gpt_oss"))[key] for key in REQUIRED_KEYS["gpt_oss"]}
    short |= {"model_type": "gpt_oss", "num_experts_per_tok": 2}
    oss = read_megatron_decoder(short)
    assert oss.sinks == SinkAttentionShape(128, (0, 2))
    assert (oss.head_dim, oss.rope["rope_type"], oss.rope["rope_theta"]) == (64, "yarn", 150000.0)
    extended = {"rope_parameters": YARN, "rope_theta": 5.0, "original_max_position_embeddings": 16}
    latent = read_megatron_decoder({**_hf(written("deepseek_v3")), **extended})
    assert latent.rope["original_max_position_embeddings"] == 16
    assert (latent.head_dim, latent.rotary_dim, latent.shared_intermediate_size) == (12, 4, 48)
    scale = pytest.approx((0.1 * 0.5 * math.log(4) + 1) ** 2)
    assert latent.latent == LatentHeads(12, 16, 8, 6, True, scale)
    full = read_megatron_decoder(_hf(written("deepseek_v3-full-queries")))
    assert (full.latent.q_rank, full.latent.query_scale) == (0, 1.0)


@pytest.mark.parametrize(
    ("model", "changes", "reason"),
    [
        ("qwen2_moe", {"use_sliding_window": True}, "sliding windows"),
        ("deepseek_v3", {"num_experts_per_tok": None}, "says nothing about num_experts_per_tok"),
        ("qwen2_moe", {"hidden_act": "gelu"}, "'gelu' is not silu"),
        ("glm4_moe", {"quantization_config": {"quant_method": "fp8"}}, "are quantized"),
        ("gpt_oss", {"quantization_config": {"quant_method": "mxfp4"}}, "are quantized"),
        ("gpt_oss", {"attention_bias": False}, "gpt_oss need attention_bias=true"),
        ("deepseek_v3", {"attention_bias": True}, "deepseek_v3 need attention_bias=false"),
        ("glm4_moe", {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "longrope"),
        ("glm4_moe", {"model_type": "olmoe"}, "its model_type is 'olmoe'"),
    ],
)
def test_what_megatron_lacks_has_no_shape(written, model, changes, reason):
    hf = {**_hf(written(model)), **changes}
    assert read_megatron_decoder(hf) is None
    assert reason in explain_missing_layers(hf)


@pytest.mark.needs("megatron")
def test_what_megatron_cannot_run_is_refused_before_processes_start(written):
    policy = TransformersPolicy.load(written("qwen2_moe"))
    check_megatron(MegatronConfig(expert_parallel=2, data_parallel=2), policy)
    with pytest.raises(ModelError, match="4 experts: set it to 2"):
        check_megatron(MegatronConfig(expert_parallel=3, data_parallel=3), policy)
    everything, shared = LoRAConfig(), LoRAConfig(target_modules=("q_proj", "down_proj"))
    with pytest.raises(ConfigError, match=r"all-linear has .* Set .*=\[q_proj, .*, down_proj\]"):
        check_megatron(MegatronConfig(), policy, everything)
    check_megatron(MegatronConfig(), policy, shared)
    policy.saved_config.hidden_act = "gelu"
    with pytest.raises(ModelError, match=r"is not silu\. Set learner.kind=dtensor"):
        check_megatron(MegatronConfig(), policy)
    oss = TransformersPolicy.load(written("gpt_oss"))
    check_megatron(MegatronConfig(), oss, everything)
    check_megatron(MegatronConfig(context_parallel=2), oss)
    with pytest.raises(ModelError, match="fp8=hybrid has no layers for a gpt_oss model"):
        check_megatron(MegatronConfig(fp8="hybrid", weights="bfloat16"), oss)
    deepseek = TransformersPolicy.load(written("deepseek_v3"))
    check_megatron(MegatronConfig(context_parallel=2), deepseek)
    with pytest.raises(ConfigError, match=r"q_proj has .* a deepseek_v3 model. Set"):
        check_megatron(MegatronConfig(), deepseek, LoRAConfig(target_modules=("q_proj",)))
    parameters = ("mlp.experts.down_proj",)
    experts = LoRAConfig(target_modules=(), target_parameters=parameters)
    check_megatron(MegatronConfig(pipeline_parallel=2), deepseek, experts)
    dense_first = MegatronConfig(pipeline_parallel=2, stage_layers=(1, 3))
    with pytest.raises(ConfigError, match=r"rank 0 nothing .* Set lora.target_modules=\[o_proj\]"):
        check_megatron(dense_first, deepseek, experts)
    unknown = LoRAConfig(target_modules=(), target_parameters=("mlp.experts.up_proj",))
    with pytest.raises(ConfigError, match=r"experts, which has mlp.experts.gate_up_proj, mlp"):
        check_megatron(MegatronConfig(), deepseek, unknown)


def test_latent_states_that_ranks_cannot_divide_are_refused(written):
    shape = read_megatron_decoder({**_hf(written("deepseek_v3")), "q_lora_rank": 13})
    with pytest.raises(ModelError, match="13 rows of latent queries: set it to 1"):
        MegatronSizes(tensor=2, sequence=True).check(shape)


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


def test_blocks_of_single_experts_lie_where_gpt_oss_packs_them(weights):
    packed = {name: tensor for name, tensor in weights("gpt_oss").items() if ".experts." in name}

    def read(name, offsets, sizes):
        places = zip(offsets, sizes, strict=True)
        return packed[name][tuple(slice(a, a + n) for a, n in places)]

    single = read_single_experts(read)
    prefix, blocks = "model.layers.1.mlp.experts.2", []
    # The second half of the rows of gate and up, and the second half of the columns of down.
    for projection, rows, columns in (("gate", 24, 0), ("up", 24, 0), ("down", 0, 24)):
        shape = (32, 48) if projection == "down" else (48, 32)
        sizes = [n - start for n, start in zip(shape, (rows, columns), strict=True)]
        for kind, dims in (("weight", 2), ("bias", 1)):
            name = f"{prefix}.{projection}_proj.{kind}"
            at = (rows, columns)[:dims]
            tensor = single(name, at, sizes[:dims])
            blocks.append(Shard(name, shape[:dims], at, tensor))
    ordered = [blocks[i] for i in (0, 2, 1, 3, 4, 5)]  # gate and up of a parameter after another
    found = list(pack_blocks(ordered, 4))
    assert [block.name.rpartition(".")[2] for block in found] == [
        "gate_up_proj",
        "gate_up_proj_bias",
        "down_proj",
        "down_proj_bias",
    ]
    for block in found:
        assert block.shape == packed[block.name].shape
        assert torch.equal(read(block.name, block.offsets, block.tensor.shape), block.tensor)
