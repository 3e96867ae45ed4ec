"""The command `ratchet explain`: show which groups, tags and tokens of a step moved the weights."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from ratchet.commands.replay.engine import Replay, ReplayedStep
from ratchet.commands.replay.gradient_attribution import (
    GroupShare,
    Influence,
    InfluenceRecorder,
    TokenPull,
)
from ratchet.data.chat.tokenizer import Tokenizer
from ratchet.errors import ConfigError
from ratchet.learners.local import LocalLearner
from ratchet.types import Group
from ratchet.utils.terminal_text import make_console

LEGEND = (
    "direction: share of the gradient, below 0 if opposed to it; the sum over all groups is 1. "
    "pull: above 0 if the step makes the token likelier."
)
N_CONTEXT_TOKENS = 12  # number of tokens shown before a token


def explain_step(
    path: Path, step: int, *, role: str = "policy", top: int = 10, as_json: bool = False
) -> None:
    """Print which groups and tokens moved a role's weights in a step.

    Raises the errors of `Replay`, and ConfigError for a role that did not train.
    """
    replay = Replay(path)
    replayed, influence = asyncio.run(measure_influence(replay, step, role=role, max_tokens=top))
    assert replay.policy is not None, "the step was replayed"
    explanation = make_explanation(replayed, influence, replay.policy.tokenizer, role=role, top=top)
    console = make_console()
    if as_json:
        console.out(json.dumps(explanation), highlight=False)
    else:
        print_explanation(explanation, console, top)


async def measure_influence(
    replay: Replay, step: int, *, role: str = "policy", max_tokens: int = 10
) -> tuple[ReplayedStep, Influence]:
    """Replay a step, and return it with the contributions of its groups and strongest tokens."""
    run = await replay.advance_to(step)
    learner = run.roles.get(role)
    if role not in run.algorithm.losses or not isinstance(learner, LocalLearner):
        raise ConfigError(
            f"stage {run.name} does not train the role {role}: give one of "
            f"{', '.join(run.algorithm.losses)}"
        )
    recorder = InfluenceRecorder(learner, max_tokens=max_tokens)
    run.roles = {**run.roles, role: recorder}
    try:
        replayed = await replay.replay_next()
    finally:
        run.roles = {**run.roles, role: learner}
    return replayed, recorder.influence


def make_explanation(
    replayed: ReplayedStep, influence: Influence, tokenizer: Tokenizer, *, role: str, top: int
) -> dict[str, Any]:
    """Return the object that `--json` writes.

    It has all groups and tags, and the `top` strongest tokens, the strongest first.
    """
    groups = {group.id: group for group in replayed.groups}
    shares, n_updates = influence.groups, max(influence.n_updates, 1)
    total_loss = sum(abs(share.loss) for share in shares.values())
    group_rows = [
        _make_group_row(groups[name], share, n_updates, total_loss)
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
    group: Group, share: GroupShare, n_updates: int, total_loss: float
) -> dict[str, Any]:
    rewards = [
        row.reward for row in group.trajectories if row.use == "train" and row.reward is not None
    ]
    return {
        "group": group.id,
        "task": group.task.id,
        "tag": group.task.tag,
        "reward_mean": fmean(rewards) if rewards else None,
        "direction": share.direction / n_updates,
        "norm": share.norm / n_updates,
        "loss": share.loss / n_updates,
        "loss_share": abs(share.loss) / total_loss if total_loss else 0.0,
    }


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
    candidates = [row for row in group.trajectories if row.counts and row.attempt == token.attempt]
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
    summary = f"gradient of {norms}" if norms else "nothing had a gradient"
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
    if explanation["tokens"]:
        text_columns = ("group", "row", "position", "before", "text")
        number_columns = ("loss_share", "pull", "pull_share")
        console.print(_make_table("Tokens", explanation["tokens"], text_columns, number_columns))
    console.print(LEGEND, highlight=False, soft_wrap=True)


def _make_table(
    title: str,
    rows: Iterable[Mapping[str, Any]],
    text_columns: Sequence[str],
    number_columns: Sequence[str],
) -> Table:
    columns = [Column(name, overflow="fold") for name in text_columns]
    table = Table(
        *columns, *(Column(name, justify="right") for name in number_columns), title=title
    )
    for row in rows:
        cells = [_make_cell(row[name]) for name in text_columns]
        table.add_row(
            *cells, *("-" if row[name] is None else f"{row[name]:.4g}" for name in number_columns)
        )
    return table


def _make_cell(value: Any) -> Any:
    # A `Text` is returned because rich would interpret markup in a string.
    return Text(repr(value)[1:-1] if isinstance(value, str) else str(value))
