"""The command `ratchet explain`: show which groups, tags and tokens of a step moved the weights."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from ratchet.commands.replay.command import (
    NOT_EQUAL,
    compare_with_record,
    describe_comparison,
    to_json,
)
from ratchet.commands.replay.engine import Replay, ReplayedStep
from ratchet.commands.replay.gradient_attribution import (
    GroupShare,
    Influence,
    InfluenceRecorder,
    TokenPull,
)
from ratchet.data.chat.tokenizer import Tokenizer
from ratchet.errors import ConfigError
from ratchet.executors.event_loop import run_event_loop
from ratchet.learners.local import LocalLearner
from ratchet.observe.sinks import read_jsonl
from ratchet.types import Group, Trajectory
from ratchet.utils.terminal_text import make_console, shorten_text

LEGEND = (
    "direction: the group's share of the gradient, below 0 if opposed to it; all groups sum to 1. "
    "of loss, of pull: share of the sum of absolute values. "
    "pull: above 0 if the step makes the token likelier."
)
NOT_RECORDED = "  What follows explains the step computed here, not the recorded one."
# Keys of the comparison with the record that `--json` writes too.
COMPARED = ("equal", "weights_differ_since", "changed_start", "differences")
N_CONTEXT_TOKENS = 12  # number of tokens shown before each of the strongest tokens
SHOWN_GROUPS = 3  # number of groups whose prompts and answers are printed
SHOWN_CHARS = 300  # characters printed of a prompt or an answer
HEADINGS = {
    "reward_mean": "reward",
    "loss_share": "of loss",
    "pull_share": "of pull",
    "position": "at",
}


def explain_step(
    path: Path, step: int, *, role: str = "policy", top: int = 10, as_json: bool = False
) -> int:
    """Print which groups and tokens moved a role's weights in a step.

    Return the exit status: 0 if the step is equal to the recorded one bit for bit, else 1; the
    differences are printed first. Raises the errors of `Replay`, and ConfigError for a role that
    did not train.
    """
    replay = Replay(path)
    replayed, influence = run_event_loop(measure_influence(replay, step, role=role, max_tokens=top))
    assert replay.policy is not None, "the step was replayed"
    row = next((row for row in read_jsonl(replay.directory.metrics) if row["step"] == step), {})
    verdict = compare_with_record(replay, replayed, row)
    explanation = make_explanation(replayed, influence, replay.policy.tokenizer, role=role, top=top)
    console = make_console()
    if as_json:
        comparison = to_json(verdict)
        explanation |= {name: comparison[name] for name in COMPARED}
        console.out(json.dumps(explanation), highlight=False)
    else:
        if not verdict.is_equal:
            lines = [*describe_comparison(verdict), NOT_RECORDED]
            console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)
        print_explanation(explanation, console, top)
    return 0 if verdict.is_equal else NOT_EQUAL


async def measure_influence(
    replay: Replay, step: int, *, role: str = "policy", max_tokens: int = 10
) -> tuple[ReplayedStep, Influence]:
    """Replay a step; return its results, and the contributions of its groups and tokens.

    Only the `max_tokens` strongest tokens of each optimizer step are kept.
    """
    run = await replay.advance_to(step)
    learner = run.roles.get(role)
    if role not in run.algorithm.losses or not isinstance(learner, LocalLearner):
        raise ConfigError(
            f"stage {run.name} does not train the role {role}: give one of "
            f"{', '.join(run.algorithm.losses)}"
        )
    recorder = InfluenceRecorder(learner, max_tokens=max_tokens)
    replayed = await replay.replay_next({role: recorder})
    return replayed, recorder.influence


def make_explanation(
    replayed: ReplayedStep, influence: Influence, tokenizer: Tokenizer, *, role: str, top: int
) -> dict[str, Any]:
    """Return the object that `--json` writes.

    The object has all groups and tags, and the `top` strongest tokens, the strongest first.
    """
    groups = {group.id: group for group in replayed.groups}
    shares, n_updates = influence.groups, max(influence.n_updates, 1)
    total_loss = sum(abs(share.loss) for share in shares.values())
    group_rows = [
        _make_group_row(groups[name], share, n_updates, total_loss, tokenizer)
        for name, share in shares.items()
    ]
    strongest = sorted(influence.tokens, key=lambda token: -abs(token.pull))[:top]
    return {
        "step": replayed.step,
        "stage": replayed.stage,
        "role": role,
        "updates": influence.n_updates,
        "gradient_norms": influence.gradient_norms,
        "tags": _sum_by_tag(group_rows),
        "groups": sorted(group_rows, key=lambda row: -abs(row["direction"])),
        "tokens": [
            _make_token_row(token, groups[token.group], tokenizer, influence) for token in strongest
        ],
    }


def _make_group_row(
    group: Group, share: GroupShare, n_updates: int, total_loss: float, tokenizer: Tokenizer
) -> dict[str, Any]:
    rewards = group.rewards
    return {
        "group": group.id,
        "task": group.task.id,
        "tag": group.task.tag,
        "reward_mean": fmean(rewards) if rewards else None,
        "direction": share.direction / n_updates,
        "norm": share.norm / n_updates,
        "loss": share.loss / n_updates,
        "loss_share": abs(share.loss) / total_loss if total_loss else 0.0,
        "prompt": _decode_parts(group.trajectories[0], tokenizer)[0],
        "answers": [
            {
                "use": row.use,
                "reward": row.reward,
                "text": _decode_parts(row, tokenizer)[1],
            }
            for row in group.trajectories
        ],
    }


def _decode_parts(row: Trajectory, tokenizer: Tokenizer) -> tuple[str, str]:
    """Return the text before the first token that trains, and the text from it on."""
    tokens = row.tokens.tolist()
    first = int(row.trainable.argmax()) if row.trainable.any() else len(tokens)
    return (
        tokenizer.decode(tokens[:first], skip_special=False),
        tokenizer.decode(tokens[first:], skip_special=False),
    )


def _sum_by_tag(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    tags: dict[str, dict[str, Any]] = {}
    for row in rows:
        tag = tags.setdefault(
            row["tag"],
            {"tag": row["tag"], "groups": 0, "direction": 0.0, "loss": 0.0, "loss_share": 0.0},
        )
        tag["groups"] += 1
        for name in ("direction", "loss", "loss_share"):
            tag[name] += row[name]
    return sorted(tags.values(), key=lambda tag: -abs(tag["direction"]))


def _make_token_row(
    token: TokenPull, group: Group, tokenizer: Tokenizer, influence: Influence
) -> dict[str, Any]:
    candidates = [
        row for row in group.trajectories if row.is_usable and row.attempt == token.attempt
    ]
    row = candidates[token.trajectory]
    context = row.tokens[max(0, token.position - N_CONTEXT_TOKENS) : token.position].tolist()
    return {
        "group": token.group,
        "row": next(index for index, other in enumerate(group.trajectories) if other is row),
        "position": token.position,
        "token": token.token,
        "text": tokenizer.decode([token.token], skip_special=False),
        "before": tokenizer.decode(context, skip_special=False),
        "loss": token.loss,
        "pull": token.pull,
        "loss_share": abs(token.loss) / influence.total_abs_loss
        if influence.total_abs_loss
        else 0.0,
        "pull_share": abs(token.pull) / influence.total_abs_pull,
    }


def print_explanation(explanation: Mapping[str, Any], console: Console, top: int) -> None:
    norms = ", ".join(f"{norm:.4g}" for norm in explanation["gradient_norms"])
    heading = f"step {explanation['step']} ({explanation['stage']}), {explanation['role']}: "
    summary = f"gradient norm {norms}" if norms else "nothing had a gradient"
    console.print(heading + summary, markup=False, highlight=False)
    if len(explanation["tags"]) > 1:
        console.print(
            _make_table(
                "Tags", explanation["tags"], ("tag", "groups"), ("direction", "loss", "loss_share")
            )
        )
    number_columns = ("reward_mean", "direction", "norm", "loss", "loss_share")
    top_groups = explanation["groups"][:top]
    console.print(
        _make_table(
            f"Groups ({len(top_groups)} of {len(explanation['groups'])})",
            top_groups,
            ("group", "tag"),
            number_columns,
        )
    )
    for row in top_groups[:SHOWN_GROUPS]:
        _print_answers(row, console)
    if explanation["tokens"]:
        text_columns = ("group", "row", "position", "before", "text")
        number_columns = ("loss_share", "pull", "pull_share")
        console.print(_make_table("Tokens", explanation["tokens"], text_columns, number_columns))
    console.print(LEGEND, highlight=False, soft_wrap=True)


def _print_answers(row: Mapping[str, Any], console: Console) -> None:
    """Print the prompt of a group, and each answer with its reward."""
    console.print(f"{row['group']}: {_quote(row['prompt'])}", markup=False, highlight=False)
    for answer in row["answers"]:
        reward = "-" if answer["reward"] is None else f"{answer['reward']:.3g}"
        note = "" if answer["use"] == "train" else f" ({answer['use']})"
        text = f"  {reward:>6}  {_quote(answer['text'])}{note}"
        console.print(text, markup=False, highlight=False)


def _quote(text: str) -> str:
    return shorten_text(repr(text)[1:-1], SHOWN_CHARS)


def _make_table(
    title: str,
    rows: Iterable[Mapping[str, Any]],
    text_columns: Sequence[str],
    number_columns: Sequence[str],
) -> Table:
    columns = [Column(HEADINGS.get(name, name), overflow="fold") for name in text_columns]
    numbers = [Column(HEADINGS.get(name, name), justify="right") for name in number_columns]
    # Narrow enough for 80 columns.
    table = Table(*columns, *numbers, title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for row in rows:
        cells = [_make_cell(row[name]) for name in text_columns]
        table.add_row(*cells, *(_format_number(name, row[name]) for name in number_columns))
    return table


def _format_number(name: str, value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1%}" if name.endswith("_share") else f"{value:.3g}"


def _make_cell(value: Any) -> Any:
    # A `Text` is returned because rich would interpret markup in a string.
    return Text(repr(value)[1:-1] if isinstance(value, str) else str(value))
