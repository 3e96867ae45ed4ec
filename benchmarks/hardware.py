"""Which model fits on which accelerators: write the table of docs/hardware.md.

    python benchmarks/hardware.py

Asks `ratchet plan --cluster` for GRPO of ten models on six accelerators, with 1 to 64 of them, and
shows the fewest on which a layout fits, with the seconds of a step. All of it is computed from
shapes and data sheets; nothing is measured.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ratchet.commands.plan.command import ProcessMemory, StagePlan, plan_stage, read_shape
from ratchet.commands.plan.show import plan_on_cluster
from ratchet.config.loader import load_config
from ratchet.config.schema import RunConfig
from ratchet.data.chat.builtin_tokenizers import byte_tokenizer
from ratchet.errors import ConfigError
from ratchet.executors.freeze import freeze
from ratchet.experience.sources.passes import resolve_passes
from ratchet.models.flops import DecoderCost
from ratchet.utils.datasheets import GIB, ClusterSpec

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "hardware.md"
BEGIN, END = "<!-- table: begin (python benchmarks/hardware.py) -->\n", "<!-- table: end -->"
KINDS = ("RTX4090", "L40S", "A100", "H100", "H200", "B200")
CLUSTERS = ("1", "2", "4", "8", "2x8", "4x8", "8x8")
RECIPE = """\
name: hardware
model: {{path: {model}}}
environment: {{kind: arithmetic}}
algorithm: {{kind: grpo, group_size: 8}}
sampling: {{max_new_tokens: 2048}}
batch_size: 16
steps: 1
evaluation: {{tasks: 0}}
"""
# Experts get no adapters, so all models have them at the maps of attention.
LORA = "lora: {rank: 32, target_modules: [q_proj, k_proj, v_proj, o_proj]}\n"

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rope_theta": 1e6,
}
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rope_theta": 5e5,
}


def make_shape(
    family: dict[str, Any],
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int,
    inner: int,
    **more: Any,
) -> dict[str, Any]:
    """Return the contents of a config.json, as the hub has it for this model."""
    return {
        **family,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": inner,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        **more,
    }


EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
    "mlp_only_layers": [],
}
TIED = {"tie_word_embeddings": True}
MODELS = {
    "Qwen3-0.6B": make_shape(QWEN3, 1024, 28, 16, 8, 3072, **TIED),
    "Llama-3.2-1B": make_shape(LLAMA, 2048, 16, 32, 8, 8192, head_dim=64, **TIED),
    "Qwen3-1.7B": make_shape(QWEN3, 2048, 28, 16, 8, 6144, **TIED),
    "Qwen3-4B": make_shape(QWEN3, 2560, 36, 32, 8, 9728, **TIED),
    "Llama-3.1-8B": make_shape(LLAMA, 4096, 32, 32, 8, 14336),
    "Qwen3-8B": make_shape(QWEN3, 4096, 36, 32, 8, 12288),
    "Qwen3-14B": make_shape(QWEN3, 5120, 40, 40, 8, 17408),
    "Qwen3-30B-A3B": make_shape(QWEN3, 2048, 48, 32, 4, 6144, **EXPERTS),
    "Qwen3-32B": make_shape(QWEN3, 5120, 64, 64, 8, 25600),
    "Llama-3.1-70B": make_shape(LLAMA, 8192, 80, 64, 8, 28672),
}


def load(shape: dict[str, Any], folder: Path, more: str) -> RunConfig:
    """Return the recipe of the table for a model directory that has this shape and no weights."""
    (folder / "config.json").write_text(json.dumps(shape))
    recipe = folder / "recipe.yaml"
    recipe.write_text(RECIPE.format(model=folder) + more)
    return freeze(resolve_passes(load_config(recipe)).config)


def find_smallest(
    config: RunConfig, plan: StagePlan, cost: DecoderCost, kind: str
) -> tuple[str, float] | None:
    """Return the smallest cluster on which a step fits, with its seconds; None if none does."""
    for size in CLUSTERS:
        spec = ClusterSpec.parse(f"{size}x{kind}")
        try:
            layout = plan_on_cluster(config, 0, plan, cost, spec)
        except ConfigError:
            continue
        return size, sum(layout.seconds_by_phase.values())
    return None


def list_rows(more: str) -> Iterator[str]:
    """Yield a row for each model."""
    for name, shape in MODELS.items():
        with tempfile.TemporaryDirectory() as folder:
            byte_tokenizer().save(Path(folder))
            config = load(shape, Path(folder), more)
            cost = DecoderCost(read_shape(config), compiled=False)
            plan = plan_stage(config, 0, cost, ProcessMemory("cuda", 0))
        cells = [find_smallest(config, plan, cost, kind) for kind in KINDS]
        shown = ["–" if cell is None else f"{cell[0]} ({cell[1]:,.0f} s)" for cell in cells]
        yield f"| {name} | {cost.parameters / 1e9:.1f} | " + " | ".join(shown) + " |"


def make_table(more: str) -> str:
    """Return the table of a recipe with these further sections."""
    memory = (f"{ClusterSpec.parse(f'1x{kind}').accelerator.memory / GIB:.0f}" for kind in KINDS)
    heads = [f"{kind}, {gib} GiB" for kind, gib in zip(KINDS, memory, strict=True)]
    lines = ["| Model | Billion parameters | " + " | ".join(heads) + " |"]
    return "\n".join([*lines, "|---" * (len(KINDS) + 2) + "|", *list_rows(more)]) + "\n"


def make_page(text: str) -> str:
    """Return the page with its tables as the planner computes them now."""
    parts = f"### All weights\n\n{make_table('')}\n### LoRA, rank 32\n\n{make_table(LORA)}"
    return text.partition(BEGIN)[0] + BEGIN + parts + END + text.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(make_page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
