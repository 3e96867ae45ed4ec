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

from ratchet.commands.replay.engine import Played, Replay
from ratchet.commands.replay.gradient_attribution import (
    GroupShare,
    Influence,
    Influences,
    TokenPull,
)
from ratchet.data.chat.tokenizer import Tokenizer
from ratchet.errors import ConfigError
from ratchet.learners.local import LocalLearner
from ratchet.types import Group
from ratchet.utils.terminal_text import make_console

HINT = (
    "direction: part along the whole gradient, all sum to 1. pull: above 0 makes the token "
    "likelier."
)
CONTEXT = 12  # number of tokens shown before a token


def explain_step(
    path: Path, step: int, *, role: str = "policy", top: int = 10, as_json: bool = False
) -> None:
    """Print what moved a role's weights in a step.

    Raise the errors of `Replay`, and ConfigError for a role that did not train.
    """
    replay = Replay(path)
    played, influence = asyncio.run(influences(replay, step, role=role, most=top))
    assert replay.policy is not None, "the step was played"
    result = explained(played, influence, replay.policy.tokenizer, role=role, top=top)
    console = make_console()
    if as_json:
        console.out(json.dumps(result), highlight=False)
    else:
        show(result, console, top)


async def influences(
    replay: Replay, step: int, *, role: str = "policy", most: int = 10
) -> tuple[Played, Influence]:
    run = await replay.before(step)
    learner = run.roles.get(role)
    if role not in run.algorithm.losses or not isinstance(learner, LocalLearner):
        raise ConfigError(
            f"nothing trains {role} in stage {run.name}: give one of "
            f"{', '.join(run.algorithm.losses)}"
        )
    recorder = Influences(learner, most=most)
    run.roles = {**run.roles, role: recorder}
    try:
        played = await replay.play()
    finally:
        run.roles = {**run.roles, role: learner}
    return played, recorder.found


def explained(
    played: Played, influence: Influence, tokenizer: Tokenizer, *, role: str, top: int
) -> dict[str, Any]:
    """Return what `--json` writes: all groups and tags, and `top` tokens, the strongest first."""
    groups = {group.id: group for group in played.groups}
    shares, updates = influence.groups, max(influence.updates, 1)
    total_loss = sum(abs(share.loss) for share in shares.values())
    rows = [_group_row(groups[name], share, updates, total_loss) for name, share in shares.items()]
    strongest = sorted(influence.tokens, key=lambda token: -abs(token.pull))[:top]
    return {
        "step": played.step,
        "stage": played.stage,
        "role": role,
        "updates": influence.updates,
        "gradient_norms": influence.norms,
        "tags": _by_tag(rows),
        "groups": sorted(rows, key=lambda row: -abs(row["direction"])),
        "tokens": [
            _token_row(token, groups[token.group], tokenizer, influence) for token in strongest
        ],
    }


def _group_row(group: Group, share: GroupShare, updates: int, total_loss: float) -> dict[str, Any]:
    rewards = [
        row.reward for row in group.trajectories if row.use == "train" and row.reward is not None
    ]
    return {
        "group": group.id,
        "task": group.task.id,
        "tag": group.task.tag,
        "reward_mean": fmean(rewards) if rewards else None,
        "direction": share.direction / updates,
        "norm": share.norm / updates,
        "loss": share.loss / updates,
        "loss_share": abs(share.loss) / total_loss if total_loss else 0.0,
    }


def _by_tag(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
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


def _token_row(
    token: TokenPull, group: Group, tokenizer: Tokenizer, influence: Influence
) -> dict[str, Any]:
    strands = [row for row in group.trajectories if row.counts and row.attempt == token.attempt]
    row = strands[token.strand]
    before = row.tokens[max(0, token.position - CONTEXT) : token.position].tolist()
    return {
        "group": token.group,
        "row": next(index for index, other in enumerate(group.trajectories) if other is row),
        "position": token.position,
        "token": token.token,
        "text": tokenizer.decode([token.token], skip_special=False),
        "before": tokenizer.decode(before, skip_special=False),
        "loss": token.loss,
        "pull": token.pull,
        "loss_share": abs(token.loss) / influence.loss if influence.loss else 0.0,
        "pull_share": abs(token.pull) / influence.pull,
    }


def show(found: Mapping[str, Any], console: Console, top: int) -> None:
    norms = ", ".join(f"{norm:.4g}" for norm in found["gradient_norms"])
    head = f"step {found['step']} ({found['stage']}), {found['role']}: "
    summary = f"gradient of {norms}" if norms else "nothing had a gradient"
    console.print(head + summary, markup=False, highlight=False)
    if len(found["tags"]) > 1:
        console.print(
            _table("Tags", found["tags"], ("tag", "groups"), ("direction", "loss", "loss_share"))
        )
    numbers = ("reward_mean", "direction", "norm", "loss", "loss_share")
    shown = found["groups"][:top]
    console.print(
        _table(f"Groups ({len(shown)} of {len(found['groups'])})", shown, ("group", "tag"), numbers)
    )
    if found["tokens"]:
        words = ("group", "row", "position", "before", "text")
        numbers = ("loss_share", "pull", "pull_share")
        console.print(_table("Tokens", found["tokens"], words, numbers))
    console.print(HINT, highlight=False, soft_wrap=True)


def _table(
    title: str, rows: Iterable[Mapping[str, Any]], words: Sequence[str], numbers: Sequence[str]
) -> Table:
    columns = [Column(name, overflow="fold") for name in words]
    table = Table(*columns, *(Column(name, justify="right") for name in numbers), title=title)
    for row in rows:
        cells = [_literal(row[name]) for name in words]
        table.add_row(
            *cells, *("-" if row[name] is None else f"{row[name]:.4g}" for name in numbers)
        )
    return table


def _literal(value: Any) -> Any:
    # A Text, since rich would read markup in a plain string.
    return Text(repr(value)[1:-1] if isinstance(value, str) else str(value))
