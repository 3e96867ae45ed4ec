"""Megatron's checkpoints in the shapes that others give them."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from models.conftest import reference as reference
from models.convert.cases import empty
from models.convert.conftest import written as written

from ratchet.commands.convert.dcp import write_chunks, write_index
from ratchet.commands.convert.megatron_format import (
    MegatronFiles,
    list_possible_names,
    list_written_locations,
    make_location,
)
from ratchet.errors import CheckpointError
from ratchet.models.convert.dimensions import Dimensions
from ratchet.models.convert.megatron import MegatronShard, fill_parameters, megatron_layout
from ratchet.models.weights.hf_weights import WeightFiles
from ratchet.protocols import Shard


def _filled(directory, dimensions):
    layout = megatron_layout(dimensions, MegatronShard())
    own = empty(layout, MegatronShard(), dimensions)
    fill_parameters(own, layout, WeightFiles.find(directory).block)
    return own


def _dimensions(directory):
    return Dimensions.from_hf(json.loads((directory / "config.json").read_text()))


def _chunk(spot, tensor):
    lead = (1,) * len(spot.stack_sizes)
    offsets = (*spot.index, *(0,) * tensor.dim())
    return Shard(
        spot.key, (*spot.stack_sizes, *tensor.shape), offsets, tensor.reshape(*lead, *tensor.shape)
    )


def _halved(shard):
    """As two ranks of tensor parallelism write it."""
    dim = len(shard.shape) - 1
    for start, part in zip((0, shard.shape[dim] // 2), shard.tensor.chunk(2, dim), strict=True):
        yield Shard(shard.name, shard.shape, (*shard.offsets[:-1], start), part)


def _save(directory, shards):
    directory.mkdir()
    write_index(directory, write_chunks(directory / "__0_0.distcp", shards))


def _assert_read(files, original):
    expected = dict(WeightFiles.find(original).read(WeightFiles.find(original).files))
    assert files.shapes == {name: tuple(tensor.shape) for name, tensor in expected.items()}
    for name, tensor in expected.items():
        assert torch.equal(files.block(name, (0,) * tensor.dim(), tensor.shape), tensor), name


def test_stacked_experts_and_norms_by_the_names_of_transformer_engine(written, tmp_path):
    dimensions = _dimensions(written("mixtral"))
    spots = [
        (make_location(list_possible_names(name)[-1], dimensions, stacked=True), tensor)
        for name, tensor in _filled(written("mixtral"), dimensions).items()
    ]
    _save(
        tmp_path / "made",
        [half for spot, tensor in spots for half in _halved(_chunk(spot, tensor))],
    )
    files = MegatronFiles(tmp_path / "made", dimensions)
    assert "decoder.layers.self_attention.linear_qkv.layer_norm_weight" in files.files.tensors
    assert files.files.shape("decoder.layers.mlp.experts.experts.linear_fc1.weight") == (
        4,
        4,
        96,
        32,
    )
    _assert_read(files, written("mixtral"))
    whole = files.block("lm_head.weight", (0, 0), (50, 32))
    assert torch.equal(files.block("lm_head.weight", (3, 5), (7, 20)), whole[3:10, 5:25])


def test_a_padded_vocabulary_loses_its_padding(written, tmp_path):
    dimensions = _dimensions(written("llama"))
    own = _filled(written("llama"), dimensions)
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        own[name] = torch.cat([own[name], torch.full((14, 32), 9.0)])
    _save(
        tmp_path / "made",
        [
            _chunk(make_location(name, dimensions, stacked=True), tensor)
            for name, tensor in own.items()
        ],
    )
    _assert_read(MegatronFiles(tmp_path / "made", dimensions), written("llama"))


def test_norms_are_written_under_both_names(written):
    dimensions = _dimensions(written("qwen3_moe-dense-first"))
    keys = {
        layer: [
            spot.key
            for spot in list_written_locations(
                f"decoder.layers.{layer}.pre_mlp_layernorm.weight", dimensions
            )
        ]
        for layer in (0, 1)
    }
    assert keys[0][1:] == ["decoder.layers.0.mlp.linear_fc1.layer_norm_weight"]
    assert keys[1] == ["decoder.layers.1.pre_mlp_layernorm.weight"]


def test_a_checkpoint_of_another_model_is_refused(written, tmp_path):
    dimensions = _dimensions(written("llama"))
    own = _filled(written("llama"), dimensions)
    _save(
        tmp_path / "made",
        [
            _chunk(make_location(name, dimensions, stacked=True), tensor)
            for name, tensor in own.items()
        ],
    )
    with pytest.raises(
        CheckpointError, match=r"lacks 'decoder.layers.0.self_attention.q_layernorm.weight'"
    ):
        MegatronFiles(tmp_path / "made", _dimensions(written("qwen3")))
    with pytest.raises(
        CheckpointError,
        match=r"fc1.weight' in .* has shape \(4, 96, 32\), but config.json implies \(4, 128, 32\)",
    ):
        MegatronFiles(tmp_path / "made", replace(dimensions, width=64))
