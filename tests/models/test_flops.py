"""What a shape costs, against the decoder itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from models.convert.cases import empty

from ratchet.config.lora import LoRAConfig
from ratchet.config.model_shape.presets import get_preset
from ratchet.models.convert.dimensions import Dimensions
from ratchet.models.convert.megatron import MegatronShard, megatron_layout
from ratchet.models.decoder import Decoder
from ratchet.models.flops import DecoderCost
from ratchet.models.layers.attention import PackedAttention
from ratchet.models.lora.decoder import Adapter
from ratchet.models.parallel.megatron_sizes import MegatronSizes
from ratchet.models.parallel.sharding import ShardIndex
from ratchet.models.policy import DecoderPolicy

SHAPES = {
    "tiny": get_preset("tiny", vocab_size=500),
    "grouped": get_preset(
        "tiny",
        vocab_size=500,
        n_layers=5,
        hidden_size=256,
        n_heads=8,
        n_kv_heads=2,
        intermediate_size=512,
    ),
    "untied": get_preset(
        "tiny", vocab_size=300, family="qwen2", tied=False, qk_norm=False, qkv_bias=True
    ),
    "biased": get_preset(
        "tiny",
        vocab_size=300,
        family="llama",
        qk_norm=False,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
    ),
    "experts": get_preset("tiny-moe", vocab_size=300),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_parameters(shape) -> None:
    assert DecoderCost(shape).parameters == sum(p.numel() for p in Decoder(shape).parameters())


@pytest.mark.parametrize(
    ("name", "division"), [("grouped", 1), ("untied", 1), ("experts", 1), ("experts", 2)]
)
def test_parameters_of_unequal_pipeline_stages(name: str, division: int) -> None:
    """Against what Megatron's parameters of each stage hold."""
    shape, dimensions = SHAPES[name], Dimensions.from_config(SHAPES[name])
    for rank in range(2):
        stage = MegatronSizes(pipeline=2, first_layers=1).stage(rank)
        place = MegatronShard(pipeline=stage, experts=ShardIndex(0, division))
        held = empty(megatron_layout(dimensions, place), place, dimensions).values()
        counted = DecoderCost(shape).count_stage_parameters(
            stage.range(shape.n_layers),
            is_first=rank == 0,
            is_last=rank == 1,
            expert_parallel=division,
        )
        assert counted.total == sum(parameter.numel() for parameter in held)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_matrices_of_layers(shape) -> None:
    decoder, cost = Decoder(shape), DecoderCost(shape)
    in_layers = [p for name, p in decoder.named_parameters() if name.startswith("layers.")]
    assert cost.count_layer_matrices() == sum(p.numel() for p in in_layers if p.dim() >= 2)
    linears = [module for _, module in decoder.layer_linears]
    assert cost.count_layer_matrices(experts=False) == sum(m.weight.numel() for m in linears)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_activations_of_a_token(shape, checkpointing: bool, compiled: bool, kernels) -> None:
    """Within a tenth of what autograd keeps; a checkpointed layer's own are computed again, one
    layer at a time."""
    kernels(compiled)
    decoder = Decoder(shape).init_weights(0)
    decoder.checkpointing = checkpointing
    own = {p.untyped_storage().data_ptr() for p in decoder.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    rows, length = 4, 64
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        positions = torch.arange(length).repeat(rows)
        hidden = decoder(
            torch.zeros(rows * length, dtype=torch.long),
            positions,
            PackedAttention([length] * rows),
        )
        hidden @ decoder.head_weight.T
    found = sum(tensor.untyped_storage().nbytes() for tensor in kept.values()) / (rows * length)
    cost = DecoderCost(shape, compiled)
    expected = cost.activation_bytes(4, checkpointing=checkpointing)
    if checkpointing:
        expected -= cost.largest_layer_bytes(4)
    # and what all layers share: ids, angles
    assert found == pytest.approx(expected, rel=0.1, abs=400)


def test_flop_are_those_of_the_products() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    shape, length = SHAPES["grouped"], 64
    decoder = Decoder(shape).init_weights(0)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        hidden = decoder(
            torch.zeros(length, dtype=torch.long), torch.arange(length), PackedAttention([length])
        )
        hidden @ decoder.head_weight.T
    # Of the kernel that attends the counter knows nothing.
    assert DecoderCost(shape).forward_flop(length, 0) == pytest.approx(
        counter.get_total_flops(), rel=1e-6
    )


@pytest.mark.parametrize("name", ["grouped", "experts", "some experts"])
@pytest.mark.parametrize("targets", ["all-linear", ("q_proj", "v_proj"), ("down_proj", "o_proj")])
def test_an_adapters_parameters(targets, name) -> None:
    shapes = SHAPES | {"some experts": replace(SHAPES["experts"], dense_layers=(1,))}
    shape, lora = shapes[name], LoRAConfig(rank=3, target_modules=targets)
    policy = DecoderPolicy(Decoder(shape).init_weights(0))
    policy.attach(Adapter(lora, seed=0))
    n_trained = sum(p.numel() for _, p in policy.trained_parameters())
    assert DecoderCost(shape).count_adapter_parameters(lora) == n_trained
