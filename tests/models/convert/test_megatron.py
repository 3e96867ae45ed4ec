"""The maps against weights as transformers writes them: every block of every weight lies where
Megatron wants it, once."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from models.convert.cases import BASE, MODELS, SPARSE, empty, places, reader

from ratchet.errors import ModelError
from ratchet.models.convert.dimensions import Dimensions, find_mtp_layers
from ratchet.models.convert.megatron import (
    MegatronShard,
    fill_parameters,
    list_blocks,
    megatron_layout,
)
from ratchet.models.convert.packed_experts import (
    pack_shapes,
    read_packed_experts,
    read_single_experts,
)
from ratchet.models.convert.tables import list_mtp_copies
from ratchet.models.parallel.megatron_sizes import MegatronSizes
from ratchet.models.parallel.sharding import ShardIndex
from ratchet.models.weights.hf_weights import WeightFiles

DIVISIONS = {
    "TP1": {},
    "TP2": {"tensor": 2},
    "TP2 x PP2": {"tensor": 2, "pipeline": 2},
    "PP4": {"pipeline": 4},
    "PP3": {"pipeline": 3},
    "PP2, 3 layers and 1": {
        "pipeline": 2,
        "stage": MegatronSizes(pipeline=2, first_layers=3).stage,
    },
    "PP3, 1, 2 and 1 layers": {
        "pipeline": 3,
        "stage": MegatronSizes(pipeline=3, stage_layers=(1, 2, 1)).stage,
    },
    "EP2": {"experts": 2},
    "TP2 x EP2, experts whole": {"tensor": 2, "experts": 2, "expert_tensor": ShardIndex()},
    "TP2, Transformer Engine": {"tensor": 2, "has_te_layers": True},
}
CONFIG = {**BASE, **SPARSE}
SPARSE_TOO = ("mixtral", "gpt_oss", "deepseek_v3", "deepseek_v3-full-queries")


def _dimensions(directory) -> Dimensions:
    hf = json.loads((directory / "config.json").read_text())
    names = WeightFiles.find(directory).files
    return replace(Dimensions.from_hf(hf), mtp_layers=find_mtp_layers(hf, names))


@pytest.mark.parametrize(
    ("model", "division"),
    [
        (m, d)
        for m in MODELS
        for d in DIVISIONS
        if "moe" in m or m in SPARSE_TOO or "experts" not in DIVISIONS[d]
    ],
)
def test_there_and_back_is_bit_exact(written, weights, model, division):
    dimensions = _dimensions(written(model))
    read = reader(written(model), dimensions)
    back: dict[str, torch.Tensor] = {}
    for place in places(**DIVISIONS[division]):
        layout = megatron_layout(dimensions, place)
        parameters = empty(layout, place, dimensions)
        fill_parameters(parameters, layout, read)
        assert not any(tensor.isnan().any() for tensor in parameters.values())
        for block in list_blocks(parameters, layout):
            whole = back.setdefault(block.name, torch.full(block.shape, float("nan")))
            sizes = block.tensor.shape
            at = tuple(slice(a, a + n) for a, n in zip(block.offsets, sizes, strict=True))
            before = whole[at]
            assert before.isnan().all() or torch.equal(before, block.tensor), "ranks disagree"
            whole[at] = block.tensor
    copies = list_mtp_copies(dimensions)
    hf = {name: tensor for name, tensor in weights(model).items() if name not in copies}
    assert len(hf) == len(weights(model)) - len(copies)
    shapes = {name: tuple(tensor.shape) for name, tensor in back.items()}
    given = _read_given(back)
    if dimensions.has_packed_experts:
        shapes, given = pack_shapes(shapes, dimensions.experts), read_packed_experts(given)
    assert shapes == {name: tuple(tensor.shape) for name, tensor in hf.items()}
    for name, tensor in hf.items():
        assert torch.equal(given(name, (0,) * tensor.dim(), tensor.shape), tensor), name


def test_any_block_of_packed_experts_can_be_read(written, weights):
    name, hf = "model.layers.1.mlp.experts.gate_up_proj", weights("gpt_oss")
    again = read_packed_experts(read_single_experts(_read_given(hf)))
    for offsets, sizes in (
        ((1, 3, 5), (2, 4, 9)),
        ((3, 0, 4), (1, 32, 2)),
        ((0, 31, 0), (4, 1, 1)),
    ):
        expected = _read_given(hf)(name, offsets, sizes)
        assert torch.equal(again(name, offsets, sizes), expected)
    assert torch.equal(again(f"{name}_bias", (2, 7), (1, 3)), hf[f"{name}_bias"][2:3, 7:10])


def _read_given(tensors):
    return lambda name, offsets, sizes: tensors[name][
        tuple(slice(a, a + n) for a, n in zip(offsets, sizes, strict=True))
    ]


def test_matrices_of_heads_and_mlps_lie_as_megatron_reads_them(written, weights):
    """Against the rules written out for tensors: KV group by group q, k, v; gate and up of each
    rank; columns behind both."""
    dimensions, hf = _dimensions(written("qwen3")), weights("qwen3")
    q, k, v = (
        hf[f"model.layers.1.self_attn.{name}_proj.weight"].view(2, -1, 8, 32) for name in "qkv"
    )
    qkv = torch.cat([q, k, v], dim=1).reshape(-1, 32)
    gate, up = (hf[f"model.layers.1.mlp.{name}_proj.weight"] for name in ("gate", "up"))
    for place in places(tensor=2):
        r = place.tensor.index
        layout = megatron_layout(dimensions, place)
        own = empty(layout, place, dimensions)
        fill_parameters(own, layout, WeightFiles.find(written("qwen3")).block)
        layer = "decoder.layers.1"
        assert torch.equal(own[f"{layer}.self_attention.linear_qkv.weight"], qkv.chunk(2)[r])
        assert torch.equal(
            own[f"{layer}.mlp.linear_fc1.weight"], torch.cat([gate.chunk(2)[r], up.chunk(2)[r]])
        )
        down, out = (
            hf[f"model.layers.1.{name}.weight"] for name in ("mlp.down_proj", "self_attn.o_proj")
        )
        assert torch.equal(own[f"{layer}.mlp.linear_fc2.weight"], down.chunk(2, dim=1)[r])
        assert torch.equal(
            own[f"{layer}.self_attention.linear_proj.weight"], out.chunk(2, dim=1)[r]
        )


def test_chunks_of_an_interleaved_pipeline_have_the_layers_that_megatron_gives_them(written):
    dimensions = _dimensions(written("llama"))
    rank, ranks, chunks = 1, 2, 2
    held = [
        {piece.name for pieces in megatron_layout(dimensions, place).values() for piece in pieces}
        for place in (
            MegatronShard(pipeline=ShardIndex(rank + ranks * chunk, ranks * chunks))
            for chunk in range(chunks)
        )
    ]
    layers = [
        sorted({name.split(".")[2] for name in names if ".layers." in name}) for names in held
    ]
    assert layers == [["1"], ["3"]]


def test_a_tied_head_apart_from_its_embedding_is_a_copy(written):
    dimensions = _dimensions(written("llama-tied"))
    whole = megatron_layout(dimensions, MegatronShard())
    last = megatron_layout(dimensions, MegatronShard(pipeline=ShardIndex(1, 2)))
    assert "output_layer.weight" not in whole
    assert last["output_layer.weight"] == whole["embedding.word_embeddings.weight"]


def test_rows_that_pad_the_vocabulary_are_zero_and_belong_to_no_weight(written):
    dimensions = replace(_dimensions(written("llama")), padded_vocabulary=128)
    read = WeightFiles.find(written("llama")).block
    rows = 0
    for place in places(tensor=4, pipeline=1):
        name = "embedding.word_embeddings.weight"
        layout = {name: megatron_layout(replace(dimensions, kv_heads=4), place)[name]}
        own = {name: torch.full((32, 32), float("nan"))}
        fill_parameters(own, layout, read)
        held = sum(len(block.tensor) for block in list_blocks(own, layout))
        assert own[name][held:].eq(0).all()
        rows += held
    assert rows == dimensions.vocabulary == 50


def test_transformer_engine_fuses_norms_and_groups_experts(written):
    dimensions = _dimensions(written("qwen3_moe-dense-first"))
    names = megatron_layout(dimensions, MegatronShard(has_te_layers=True))
    assert "decoder.layers.0.mlp.linear_fc1.layer_norm_weight" in names
    assert "decoder.layers.1.pre_mlp_layernorm.weight" in names
    assert "decoder.layers.1.self_attention.linear_qkv.layer_norm_weight" in names
    assert "decoder.layers.1.mlp.experts.linear_fc1.weight3" in names
    latent = megatron_layout(
        _dimensions(written("deepseek_v3")),
        MegatronShard(tensor=ShardIndex(1, 2), has_te_layers=True),
    )
    (whole,) = latent["decoder.layers.0.self_attention.linear_kv_down_proj.weight"]
    assert len(whole.rows) == whole.shape[0] == 20
    assert "decoder.layers.0.self_attention.linear_kv_up_proj.layer_norm_weight" in latent


@pytest.mark.parametrize(
    ("model", "place", "message"),
    [
        (
            "qwen3",
            MegatronShard(tensor=ShardIndex(0, 4)),
            "doesn't divide the model's 2 KV heads: set it to 2",
        ),
        (
            "qwen3",
            MegatronShard(pipeline=ShardIndex(0, 8)),
            "8 pipeline stages .* 4 layers: set .* to at most 4",
        ),
        ("qwen3", MegatronShard(experts=ShardIndex(0, 2)), "0 experts: set it to 1"),
        ("mixtral", MegatronShard(experts=ShardIndex(0, 3)), "4 experts: set it to 2"),
    ],
)
def test_what_megatron_cannot_divide_is_refused(written, model, place, message):
    with pytest.raises(ModelError, match=message):
        megatron_layout(_dimensions(written(model)), place)


def test_a_model_of_other_parameters_is_refused(written):
    dimensions = _dimensions(written("qwen2"))
    layout = megatron_layout(dimensions, MegatronShard())
    parameters = empty(layout, MegatronShard(), dimensions)
    del parameters["decoder.layers.2.self_attention.linear_qkv.bias"]
    with pytest.raises(
        ModelError, match=r"lacks the parameters decoder.layers.2.self_attention.linear_qkv.bias"
    ):
        fill_parameters(parameters, layout, WeightFiles.find(written("qwen2")).block)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"model_type": "gpt2"},
            "model_type 'gpt2' can't be converted to Megatron: use a model of llama, .*deepseek_v3",
        ),
        ({"model_type": "deepseek_v3"}, "lacks vocab_size"),
        (
            {"model_type": "gpt_oss", **CONFIG, "quantization_config": {"quant_method": "mxfp4"}},
            "gpt_oss model are quantized",
        ),
        ({"model_type": "gpt_oss", **CONFIG, "attention_bias": False}, "must be true"),
        ({"model_type": "qwen2_moe", "vocab_size": 50}, "qwen2_moe model lacks hidden_size"),
        (
            {"model_type": "gemma3_text"},
            r"has no norms behind attention and MLP.* by learner.kind=dtensor",
        ),
        ({"model_type": "qwen3_next"}, "only with fla's CUDA kernels"),
    ],
)
def test_an_architecture_without_a_map_is_refused(config, message):
    with pytest.raises(ModelError, match=message):
        Dimensions.from_hf(config)
