"""The memory of each pipeline rank: by hand, and against the parameters that ranks really hold."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from learners.ranks import run_ranks

from ratchet.commands.plan.command import ProcessMemory, Workload, plan_stage
from ratchet.commands.plan.pipeline import RankPlan, plan_pipeline_ranks
from ratchet.commands.plan.show import read_cost
from ratchet.config.loader import load_config
from ratchet.config.model_shape.decoder_config import DecoderConfig
from ratchet.config.resolve import build
from ratchet.errors import ModelError
from ratchet.executors.freeze import freeze
from ratchet.models.flops import DecoderCost
from ratchet.models.load import init_policy

RECIPE = """
threads: 1
model: MODEL
tokenizer: {kind: characters, alphabet: "0123456789="}
environment: {kind: sorting, digits: 3}
evaluation: {tasks: 0}
algorithm: {kind: grpo, group_size: 4}
sampling: {max_new_tokens: 4}
steps: 1000
batch_size: 2
"""
TINY = "{preset: tiny, overrides: {hidden_size: 32, n_layers: 5}}"
CPU = ProcessMemory("cpu", 100 * 2**20)


def plan_ranks(
    path: Path, *overrides: str, process: ProcessMemory = CPU, model: str = TINY
) -> tuple[tuple[RankPlan, ...], DecoderCost, Workload]:
    (path / "recipe.yaml").write_text(RECIPE.replace("MODEL", model))
    config = freeze(load_config(path / "recipe.yaml", list(overrides)))
    cost, stage = read_cost(config), config.stages[0]
    workload = plan_stage(config, 0, cost, process).workload
    algorithm = build(stage.algorithm)
    return plan_pipeline_ranks(stage, algorithm, cost, process, workload), cost, workload


@pytest.mark.parametrize(
    "keys",
    [
        ("learner.kind=megatron", "learner.data_parallel=2", "learner.first_stage_layers=1"),
        ("learner.kind=dtensor", "learner.dp_shard=2", "learner.stage_layers=[1,4]"),
    ],
)
def test_memory_of_unequal_pipeline_ranks_by_hand(tmp_path: Path, keys: tuple[str, ...]) -> None:
    """The first rank keeps activations of two micro-batches, of one layer; the last those of one,
    of four, and the logits. Two data ranks share out moments and rows; FSDP's share out weights
    too, but gather them."""
    (first, last), cost, workload = plan_ranks(tmp_path, *keys, "learner.pipeline_parallel=2")
    assert (first.layers, last.layers) == ((range(1),), (range(1, 5),))
    embedding, d = cost.shape.vocab_size * 32, 32
    layer = (cost.parameters - embedding - d) // 5
    norms = 2 * d + 2 * cost.shape.head_dim
    tokens = 4 * workload.max_sequence_tokens
    kept = cost.layers_activation_bytes([0], 4, checkpointing=False)
    for rank, parameters, vectors, micros in (
        (first, embedding + layer, norms, 2),
        (last, embedding + d + 4 * layer, 4 * norms + d, 4),
    ):
        states = {
            "weights": 4 * parameters,
            "gradients": 4 * parameters,
            "optimizer": 8 * parameters // 2,
        }
        if "learner.kind=dtensor" in keys:
            shard = (parameters - vectors) // 2 + vectors
            states |= {
                "weights": 4 * shard,
                "gathered weights": 4 * (parameters - vectors),
                "optimizer": 8 * shard,
            }
        assert rank.bytes_by_purpose == {
            **states,
            "activations": micros * tokens * kept,
            **({"logits": 3 * tokens * cost.shape.vocab_size * 4} if rank is last else {}),
        }


def test_states_of_optimizers_and_accelerators(tmp_path: Path) -> None:
    """Muon keeps one moment and ema_decay an average; an accelerator gathers layers in bfloat16."""
    keys = ("learner.kind=dtensor", "learner.pipeline_parallel=2", "learner.dp_shard=2")
    (first, _), cost, _ = plan_ranks(
        tmp_path,
        *keys,
        "optimizer.kind=muon",
        "optimizer.ema_decay=0.9",
        process=ProcessMemory("cuda", 0),
    )
    sizes = first.bytes_by_purpose
    assert sizes["optimizer"] == sizes["average"] == sizes["weights"]
    stage = cost.count_stage_parameters(range(2), is_first=True, is_last=False)
    embedding = cost.shape.vocab_size * 32
    assert sizes["gathered weights"] == 2 * (stage.matrices - embedding) + 4 * embedding


def test_frozen_weights_have_no_gradients_and_no_moments(tmp_path: Path) -> None:
    """All that the first rank has, and of the last one its copy of the tied embedding."""
    model = TINY.replace("}}", "}, freeze: [model.embed_tokens, model.layers.0, model.layers.1]}")
    keys = ("learner.kind=dtensor", "learner.pipeline_parallel=2", "learner.dp_shard=2")
    whole_ranks, cost, _ = plan_ranks(tmp_path, *keys)
    ranks, frozen_cost, _ = plan_ranks(tmp_path, *keys, model=model)
    embedding, last = cost.shape.vocab_size * 32, whole_ranks[1].bytes_by_purpose
    (first, rest) = (rank.bytes_by_purpose for rank in ranks)
    assert (first["gradients"], first["optimizer"]) == (0, 0)
    assert rest["gradients"] == last["gradients"] - 4 * embedding
    assert rest["optimizer"] == last["optimizer"] - 8 * embedding // 2
    assert (rest["weights"], first["weights"]) == (
        last["weights"],
        whole_ranks[0].bytes_by_purpose["weights"],
    )
    config = freeze(load_config(tmp_path / "recipe.yaml"))
    stage = cost.count_stage_parameters(range(2), is_first=True, is_last=False)
    memory = plan_stage(config, 0, frozen_cost, CPU).memory
    assert memory.phases["update"]["gradients"] == 4 * (cost.parameters - stage.total)
    assert memory.resident["policy: optimizer"] == 8 * (cost.parameters - stage.total)


def test_divisions_that_the_learner_refuses_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="6 pipeline stages are more than 5 layers"):
        plan_ranks(tmp_path, "learner.kind=dtensor", "learner.pipeline_parallel=6")


SHAPES = {
    "biased": DecoderConfig(
        24, 16, 5, 4, 2, 8, 24, tied=False, qk_norm=False, qkv_bias=True, family="qwen2"
    ),
    "tied": DecoderConfig(24, 16, 5, 4, 2, 8, 24),
    "experts": DecoderConfig(
        24,
        16,
        5,
        4,
        2,
        8,
        24,
        family="qwen3_moe",
        n_experts=4,
        experts_per_token=2,
        expert_intermediate_size=16,
        dense_layers=(1,),
    ),
}
FROZEN = ("model.embed_tokens", "model.layers.0", "*.o_proj", "*.input_layernorm.weight")
CASES = [
    ("biased", "tensor_parallel=2 pipeline_parallel=2 stage_layers=[1,4]", FROZEN),
    ("tied", "dp_shard=2 pipeline_parallel=2 pipeline_chunks=2 stage_layers=[2,1,1,1]", FROZEN),
    ("experts", "dp_shard=2 pipeline_parallel=2 expert_parallel=2", FROZEN),
    ("experts", "tensor_parallel=2 pipeline_parallel=2 stage_layers=[2,3]", ()),
]
FUSED = (
    "{rank: 3, target_modules: [q_proj, o_proj], "
    "target_parameters: [experts.gate_up_proj, experts.down_proj]}"
)
LORAS = {"ratchet": ["null", "{rank: 3}"], "transformers": ["null", FUSED]}


@pytest.mark.slow
def test_ranks_hold_and_train_the_weights_that_the_plan_counts(tmp_path: Path) -> None:
    plans, sections = [], []
    for name, text, frozen in CASES:
        directory = tmp_path / name
        init_policy(SHAPES[name], seed=0, dtype=torch.float32).save(directory)
        keys = ["learner.kind=dtensor", *(f"learner.{key}" for key in text.split())]
        for backend, loras in LORAS.items():
            for lora in loras[: 2 if name == "experts" else 1]:
                patterns = frozen if lora == "null" else ()
                keys_and_lora = [*keys, f"lora={lora}", "generator={kind: hf}"]
                model = f"{{path: {directory}, backend: {backend}, freeze: {[*patterns]}}}"
                ranks, _, _ = plan_ranks(tmp_path, *keys_and_lora, model=model)
                sizes = [rank.bytes_by_purpose for rank in ranks]
                held = [size["weights"] + size.get("adapters", 0) for size in sizes]
                plans.append(
                    [[n // 4, size["optimizer"] // 8] for n, size in zip(held, sizes, strict=True)]
                )
                config = freeze(load_config(tmp_path / "recipe.yaml", keys_and_lora))
                stage = config.stages[0]
                section = stage.learner.model_dump(mode="json")
                sections.append((section, str(directory), backend, stage.lora, patterns))
    results = run_ranks(4, "learners.spread_cases:count_parameters", sections)
    for case, plan in enumerate(plans):
        held = [counts[case] for counts in results]
        assert held == [plan[rank] for rank in (0, 0, 1, 1)], sections[case]
