"""Layers for multi-token prediction (MTP) as transformers builds them, for equations 21 to 23 of
DeepSeek-V3 (arXiv:2412.19437)."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, modeling_layers


def load_mtp(directory):
    """The MTP layers of a directory; skips where transformers has none."""
    if not hasattr(modeling_layers, "MtpModel"):
        pytest.skip("this version of transformers has no MtpModel")
    model = AutoModelForCausalLM.from_pretrained(directory).eval()
    first, count = model.config.num_hidden_layers, model.config.num_mtp_layers
    # transformers knows only the numbers that the layers have in published models.
    model._keys_to_ignore_on_load_unexpected = [
        rf"model\.layers\.{first + number}\..*" for number in range(count)
    ]
    return modeling_layers.MtpModel.from_pretrained(model).eval()


def compute_mtp_states(mtp, embedding, hidden_Td, tokens_T):
    """The states of each depth k, of all tokens that have another one k places later: [T - k, d].

    hidden_Td: those of the main model for one sequence, after its last norm."""
    states = []
    for depth, layer in enumerate(mtp.layers, start=1):
        rows = len(tokens_T) - depth
        if rows < 1:
            break
        positions = torch.arange(rows)[None]
        embedded = layer.enorm(embedding(tokens_T[depth:]))
        x = layer.eh_proj(torch.cat([embedded, layer.hnorm(hidden_Td[:rows])], dim=-1))[None]
        x = layer.mtp_block(
            x,
            position_embeddings=mtp.rotary_emb(x, position_ids=positions),
            position_ids=positions,
            attention_mask=None,  # causal, by torch's own kernel
        )
        hidden_Td = layer.post_norm(x)[0]
        states.append(hidden_Td)
    return states


def list_mtp_weights(mtp, first):
    """By their names in files, without the copies of embedding and head. first: the number of the
    first MTP layer."""
    found = {}
    for number, layer in enumerate(mtp.layers, start=first):
        for name, tensor in layer.state_dict().items():
            name = name.replace("post_norm.", "shared_head.norm.").removeprefix("mtp_block.")
            for short, part in _single_experts(name, tensor):
                found[f"model.layers.{number}.{short}"] = part
    return found


def _single_experts(name, tensor):
    """transformers stacks experts, and gate above up."""
    parent, is_expert, projection = name.partition("mlp.experts.")
    if not is_expert:
        yield name, tensor
        return
    for expert, matrix in enumerate(tensor):
        names = ("gate_proj", "up_proj") if projection == "gate_up_proj" else ("down_proj",)
        for short, part in zip(names, matrix.chunk(len(names)), strict=True):
            yield f"{parent}mlp.experts.{expert}.{short}.weight", part
