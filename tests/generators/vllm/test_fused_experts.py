"""Adapters of fused experts in vLLM: what it reads from the files that a push leaves. Its product of
experts and adapters needs an accelerator."""

import re
from types import SimpleNamespace

import pytest
import torch

from ratchet.config.lora import LoRAConfig
from ratchet.errors import ModelError
from ratchet.generators.vllm.lora import (
    AdapterSender,
    check_expert_matrices,
    explain_unknown_experts,
    has_fused_experts,
)
from ratchet.models.lora.decoder import Adapter
from ratchet.models.lora.experts import ExpertFactors
from ratchet.protocols import Shard

pytestmark = pytest.mark.needs("peft")
EXPERTS, RANK, HIDDEN, SIZE = 3, 2, 8, 4
MODULE = "model.layers.1.mlp.experts"
LORA = LoRAConfig(
    rank=RANK,
    alpha=3.0,
    target_modules=("q_proj",),
    target_parameters=("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
)


def name(path, factor):
    return f"base_model.model.{path}.lora_{factor}.weight"


def pushed(directory):
    """(weights by name, directory) of an adapter that a push brought."""
    torch.manual_seed(0)
    sides = {f"{MODULE}.base_layer": (HIDDEN, 2 * SIZE), MODULE: (SIZE, HIDDEN)}
    weights = {}
    for path, (inputs, outputs) in sides.items():
        weights[name(path, "A")] = torch.randn(EXPERTS * RANK, inputs)
        weights[name(path, "B")] = torch.randn(outputs, RANK * EXPERTS)
    query = "model.layers.1.self_attn.q_proj"
    weights[name(query, "A")] = torch.randn(RANK, HIDDEN)
    weights[name(query, "B")] = torch.randn(HIDDEN, RANK)
    sender = AdapterSender(directory)
    sender.expect(Adapter(LORA), {key: tuple(w.shape) for key, w in weights.items()})
    for key, weight in weights.items():
        sender.add(Shard(key, tuple(weight.shape), (0, 0), weight))
    return weights, sender.write()[0]


@pytest.mark.slow
@pytest.mark.needs("vllm")
@pytest.mark.parametrize("architecture", ["Qwen3MoeForCausalLM", "GptOssForCausalLM"])
def test_vllm_reads_the_matrices_of_each_expert(architecture, tmp_path):
    """GPT-OSS has the rows of gate and up by turns."""
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.model_manager import LoRAModelManager
    from vllm.lora.peft_helper import PEFTHelper

    weights, directory = pushed(tmp_path)
    loaded = LoRAModel.from_local_checkpoint(
        str(directory),
        {"q_proj", "experts"},
        peft_helper=PEFTHelper.from_local_dir(str(directory), None),
        lora_model_id=1,
        device="cpu",
        dtype=torch.float32,
    )
    for lora in loaded.loras.values():
        lora.optimize()  # multiplies B by the scale
    manager = SimpleNamespace(
        model=SimpleNamespace(config=SimpleNamespace(architectures=[architecture])),
        _get_lora_layer_weights=lambda model, path: model.get_lora(path),
    )
    experts = SimpleNamespace(local_num_experts=EXPERTS, global_num_experts=EXPERTS, ep_rank=0)
    LoRAModelManager._convert_3d_to_2d_moe_lora(manager, loaded, experts, MODULE)
    lora = loaded.get_lora(MODULE)
    gate, down, up = (b @ a for a, b in zip(lora.lora_a, lora.lora_b, strict=True))
    factors = ExpertFactors("", EXPERTS, is_transposed=False)
    gate_up, expected_down = (
        LORA.scale * factors.multiply(weights[name(path, "A")], weights[name(path, "B")])
        for path in (f"{MODULE}.base_layer", MODULE)
    )
    halves = (
        (gate_up[:, ::2], gate_up[:, 1::2])
        if architecture.startswith("GptOss")
        else gate_up.chunk(2, dim=1)
    )
    torch.testing.assert_close((gate, up), halves)
    torch.testing.assert_close(down, expected_down)
    assert loaded.get_lora("model.layers.1.self_attn.q_proj") is not None


def test_what_vllm_would_leave_out_is_refused(tmp_path):
    weights, directory = pushed(tmp_path)
    assert has_fused_experts(directory)
    check_expert_matrices(weights)
    for others in (".base_layer", ""):
        with pytest.raises(
            ModelError, match=r"of both only.*gate_up_proj, mlp.experts.down_proj\]"
        ):
            check_expert_matrices([key for key in weights if f"{MODULE}{others}.lora" not in key])
    # A worker of another pipeline stage has other layers.
    assert not explain_unknown_experts(str(directory), ["model.layers.7.mlp.experts"])
    mixtral = explain_unknown_experts(str(directory), ["model.layers.1.block_sparse_moe.experts"])
    assert re.match(rf"vLLM's model has no '{MODULE}'.*Set generator.kind=hf", mixtral)
