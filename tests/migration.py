"""What docs/migrate.md and docs/start/from-*.md show of the importer's tables:
`python tests/migration.py` writes it anew."""

from __future__ import annotations

import tempfile
from pathlib import Path

from ratchet.commands.migrate.importer import PEERS, Item, read_config
from ratchet.commands.migrate.table import KeyRow, Peer
from ratchet.config.yaml_tree import write_text

PAGE = Path(__file__).resolve().parent.parent / "docs" / "migrate.md"
# Keys of ours that most users set; what brings them is looked up in the tables.
MAIN = (
    "model.path",
    "environment.train",
    "rewards",
    "algorithm.kind",
    "batch_size",
    "algorithm.group_size",
    "algorithm.minibatches",
    "algorithm.epochs",
    "steps",
    "passes",
    "sampling.max_new_tokens",
    "sampling.temperature",
    "optimizer.lr",
    "optimizer.schedule",
    "optimizer.warmup_steps",
    "algorithm.loss",
    "algorithm.weighting",
    "algorithm.advantage.scale",
    "algorithm.kl",
    "algorithm.correction",
    "algorithm.truncated",
    "rollouts.dynamic_sampling",
    "rollouts.max_staleness",
    "learner",
    "generator",
    "lora.rank",
    "checkpoint.every",
    "evaluation.every",
    "logging.sinks",
)
EXAMPLES = {
    "trl": (
        "grpo.yaml",
        """\
model_name_or_path: Qwen/Qwen2.5-1.5B-Instruct
dataset_name: data/maths.jsonl
learning_rate: 1.0e-6
max_steps: 200
per_device_train_batch_size: 16
gradient_accumulation_steps: 4
num_generations: 8
max_completion_length: 1024
beta: 0.01
loss_type: grpo
reward_funcs: [accuracy_reward]
use_liger_kernel: true
""",
    ),
    "verl": (
        "run.sh",
        """\
python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=grpo \\
    data.train_files=data/gsm8k/train.parquet \\
    data.train_batch_size=256 \\
    data.max_response_length=1024 \\
    actor_rollout_ref.model.path=Qwen/Qwen2.5-7B-Instruct \\
    actor_rollout_ref.actor.ppo_mini_batch_size=64 \\
    actor_rollout_ref.actor.use_kl_loss=True \\
    actor_rollout_ref.rollout.name=vllm \\
    actor_rollout_ref.rollout.n=5 \\
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \\
    trainer.n_gpus_per_node=8 trainer.nnodes=1 trainer.total_epochs=15
""",
    ),
    "nemo-rl": (
        "grpo_math.yaml",
        """\
grpo: {num_prompts_per_step: 32, num_generations_per_prompt: 16, max_num_steps: 500, use_leave_one_out_baseline: false}
loss_fn: {reference_policy_kl_penalty: 0.01, ratio_clip_min: 0.2, ratio_clip_max: 0.28, token_level_loss: true}
policy:
  model_name: Qwen/Qwen2.5-1.5B
  train_global_batch_size: 128
  max_total_sequence_length: 2048
  optimizer: {name: torch.optim.AdamW, kwargs: {lr: 5.0e-6, weight_decay: 0.01, betas: [0.9, 0.999]}}
  generation: {backend: vllm, max_new_tokens: "${policy.max_total_sequence_length}", temperature: 1.0}
data: {train: {dataset_name: OpenMathInstruct-2}}
cluster: {gpus_per_node: 1, num_nodes: 1}
""",
    ),
    "roll": (
        "rlvr.yaml",
        """\
pretrain: Qwen/Qwen2.5-7B
max_steps: 500
rollout_batch_size: 64
num_return_sequences_in_group: 8
response_length: 4096
adv_estimator: grpo
max_len_mask: true
actor_train:
  training_args: {learning_rate: 1.0e-6, per_device_train_batch_size: 1, gradient_accumulation_steps: 32, warmup_steps: 20}
  data_args: {file_name: [data/math.jsonl]}
  strategy_args: {strategy_name: megatron_train, strategy_config: {tensor_model_parallel_size: 2}}
  device_mapping: list(range(0,8))
actor_infer:
  generating_args: {temperature: 0.99, top_p: 1.0, top_k: 0}
  strategy_args: {strategy_name: vllm}
  device_mapping: list(range(8,16))
""",
    ),
}


def page(text: str) -> str:
    """The page with its generated parts, each between two comments, as the tables have them now."""
    for name, part in (("names", names()), ("examples", examples()), ("keys", keys())):
        text = replace_part(text, name, part)
    return text


def replace_part(text: str, name: str, part: str) -> str:
    """Return a page with another text between the comments of this name."""
    begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
    return text.partition(begin)[0] + begin + part + end + text.partition(end)[2]


def peer_pages() -> dict[Path, str]:
    """Return the pages for users of one library, by path, as the tables have them now."""
    paths = {name: PAGE.parent / "start" / f"from-{name}.md" for name in PEERS}
    return {
        path: replace_part(path.read_text(encoding="utf-8"), "names", peer_names(PEERS[name]))
        for name, path in paths.items()
    }


def peer_names(peer: Peer) -> str:
    """Return a table of our main keys and those of one library that set them."""
    lines = [f"| {peer.title} | Here |", "|---|---|"]
    for ours in MAIN:
        theirs = _bringing(peer, ours)
        if theirs != "–":
            lines.append(f"| {theirs} | `{ours}` |")
    return "\n".join(lines) + "\n"


def names() -> str:
    """Which keys bring each of the main ones of ours."""
    lines = [
        "| Here | " + " | ".join(peer.title for peer in PEERS.values()) + " |",
        "|---" * (len(PEERS) + 1) + "|",
    ]
    for ours in MAIN:
        lines.append(
            f"| `{ours}` | " + " | ".join(_bringing(peer, ours) for peer in PEERS.values()) + " |"
        )
    return "\n".join(lines) + "\n"


def _bringing(peer: Peer, ours: str) -> str:
    """Of its first method, which is the one with attempts."""
    rows = next(iter(peer.methods.values())).rows
    found = [
        row.peer_key
        for row in rows
        if any(key == ours or key.startswith(f"{ours}.") for key in row.recipe_key.split(", "))
    ]
    found = found or [
        row.peer_key
        for row in rows
        if any(ours.startswith(f"{key}.") for key in row.recipe_key.split(", ") if key)
    ]
    return ", ".join(f"`{key}`" for key in found[:4]) or "–"


def examples() -> str:
    parts = []
    for name, (file, text) in EXAMPLES.items():
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / file
            path.write_text(text, encoding="utf-8")
            result = read_config(path)
        assert result.peer.name == name
        assert not result.problems
        language = "bash" if file.endswith(".sh") else "yaml"
        parts.append(
            f"### {result.peer.title}\n\n```{language}\n# {file}\n{text}```\n"
            f"`ratchet import {file} --out recipe.yaml` makes of "
            f"it:\n\n```yaml\n{write_text(result.recipe)}```\n"
            f"It says what means something else here for {_listed(result.different)}"
            + (
                f", and why there is nothing for {_listed(result.dropped)}"
                if result.dropped
                else ""
            )
            + ".\n"
        )
    return "\n".join(parts)


def _listed(items: list[Item]) -> str:
    return ", ".join(f"`{item.peer_key}`" for item in items if not item.is_default)


def keys() -> str:
    """Every row of every table; of further methods what the ones before don't have."""
    parts = []
    for peer in PEERS.values():
        parts.append(f"### {peer.title} ({peer.version})\n")
        seen: set[tuple[str, str, str]] = set()
        for name, method in peer.methods.items():
            rows = [
                row for row in method.rows if (row.peer_key, row.recipe_key, row.note) not in seen
            ]
            seen |= {(row.peer_key, row.recipe_key, row.note) for row in rows}
            parts.append(
                f"#### {name}\n\n| There | Here | What differs, or why there is none "
                "|\n|---|---|---|"
            )
            parts += [_line(row) for row in rows]
            parts.append("")
    return "\n".join(parts)


def _line(row: KeyRow) -> str:
    ours = (
        ", ".join(f"`{key}`" for key in row.recipe_key.split(", "))
        if row.recipe_key
        else f"with `{row.covered_by}`"
        if row.covered_by
        else "–"
    )
    return f"| `{row.peer_key}` | {ours} | {row.note.replace('|', chr(92) + '|')} |"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    for path, text in peer_pages().items():
        path.write_text(text, encoding="utf-8")
