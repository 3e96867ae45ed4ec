"""The command `ratchet data inspect`: rows as the model will see them, after the chat template,
with the tokens that train."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from ratchet.config.from_words import section_from_words
from ratchet.config.loader import load_config
from ratchet.config.resolve import build
from ratchet.config.schema import RunConfig, StageConfig
from ratchet.data.chat.builtin_tokenizers import byte_tokenizer
from ratchet.data.chat.renderer import Renderer
from ratchet.data.chat.tokenizer_loading import load_tokenizer
from ratchet.data.presets.lookup import PUBLISHED
from ratchet.errors import ConfigError, DataError
from ratchet.experience.sources.offline import (
    LabelledSource,
    PairSource,
    SteppedSource,
    SupervisedSource,
    TextRenderer,
)
from ratchet.experience.sources.rollouts import StreamSource
from ratchet.experience.sources.tasks import TaskStream
from ratchet.protocols import (
    Environment,
    HasLabelledAnswers,
    HasPreferencePairs,
    HasStepLabels,
    HasTools,
)
from ratchet.training.from_config import get_chat_template, load_policy_processor
from ratchet.types import Split, Task, Trajectory
from ratchet.utils.terminal_text import escape_controls, make_console

ROLES = {
    "pairs": ("chosen", "rejected"),
    "labelled": ("answer",),
    "steps": ("answer",),
    "rows": ("row",),
}
QUANTILES = {"least": 0.0, "median": 0.5, "p95": 0.95, "most": 1.0}


@dataclass(frozen=True)
class Shown:
    """A sequence of tokens. part: "row", "chosen", "rejected", "answer" or "prompt". trainable
    [tokens]."""

    task: Task
    part: str
    tokens: Sequence[int]
    trainable: Sequence[bool]

    def spans(self) -> Iterator[tuple[bool, int, int]]:
        """Yield (trains, start, end) of each stretch of tokens that all train, or all don't."""
        start = 0
        for trains, run in groupby(self.trainable):
            end = start + len(list(run))
            yield bool(trains), start, end
            start = end

    def as_json(self, renderer: Renderer) -> dict[str, Any]:
        return {
            "id": self.task.id,
            "part": self.part,
            "tokens": len(self.tokens),
            "trainable": sum(self.trainable),
            "spans": [[start, end] for trains, start, end in self.spans() if trains],
            "text": renderer.tokenizer.decode(self.tokens, skip_special=False),
            "ids": [int(token) for token in self.tokens],
            "answer": self.task.answer,
        }


@dataclass(frozen=True)
class Inspected:
    """The data to show. learns: what the algorithm learns from (see `StageConfig.source`); None:
    decided by each row."""

    environment: Environment
    renderer: Renderer
    learns: str | None
    turns: str
    seed: int


def inspect(
    target: str,
    words: Sequence[str],
    *,
    rows: int,
    sample: int,
    split: Split,
    stage: str | None,
    tokenizer: str | None,
    template: str | None,
    as_json: bool,
) -> None:
    """Write the first `rows` rows and the lengths of the first `sample` to stdout.

    Raises ConfigError or DataError if the recipe or the data can't be used.
    """
    data = (
        _inspect_recipe(target, words, stage)
        if target.endswith((".yaml", ".yml"))
        else _inspect_file(target, words)
    )
    if tokenizer is not None or template is not None:
        loaded = data.renderer.tokenizer if tokenizer is None else load_tokenizer(tokenizer)
        data = Inspected(
            data.environment, Renderer(loaded, template), data.learns, data.turns, data.seed
        )
    tasks = islice(_once(data.environment.tasks(split, seed=data.seed)), max(rows, sample))
    shown = [one for task in tasks for one in _shown(data, task)]
    names = list(dict.fromkeys(one.task.id for one in shown))[:rows]
    first = [one for one in shown if one.task.id in names]
    if as_json:
        answer = {"rows": [one.as_json(data.renderer) for one in first], "lengths": lengths(shown)}
        sys.stdout.write(json.dumps(answer) + "\n")
    else:
        _show(make_console(), first, shown, data.renderer)


def _once(tasks: Iterator[Task]) -> Iterator[Task]:
    """Yield tasks up to where a second pass begins."""
    seen: set[str] = set()
    for task in tasks:
        if task.id in seen:
            return
        seen.add(task.id)
        yield task


# --- where rows come from


def _inspect_recipe(recipe: str, words: Sequence[str], stage: str | None) -> Inspected:
    config = load_config(recipe, words)
    chosen = _stage(config, stage)
    tokenizer = build(config.tokenizer, config.model.path)
    # Of a model that is here: none is fetched to show rows.
    processor = (
        load_policy_processor(config)
        if config.model.path and Path(config.model.path).is_dir()
        else None
    )
    format_of_tools = getattr(config.tokenizer, "tool_format", "auto")
    renderer = Renderer(
        tokenizer, get_chat_template(config), processor=processor, tool_format=format_of_tools
    )
    algorithm = build(chosen.algorithm)
    turns = getattr(algorithm, "turns", "all")
    return Inspected(build(chosen.environment), renderer, chosen.source, turns, config.seed)


def _stage(config: RunConfig, name: str | None) -> StageConfig:
    if name is None:
        return config.stages[0]
    chosen = next((stage for stage in config.stages if stage.name == name), None)
    if chosen is None:
        raise ConfigError(
            f"there is no stage '{name}': there are "
            f"{', '.join(stage.name for stage in config.stages)}"
        )
    return chosen


def _inspect_file(target: str, words: Sequence[str]) -> Inspected:
    """Return a file, directory, address or preset by name; the words are keys of the environment
    `dataset`."""
    key = "preset" if target in PUBLISHED and not Path(target).exists() else "train"
    section = section_from_words("environment", "dataset", [f"{key}={json.dumps(target)}", *words])
    environment: Environment = build(section)
    # the latter knows no tools
    template = "chatml" if isinstance(environment, HasTools) else "turns"
    return Inspected(environment, Renderer(byte_tokenizer(), template), None, "all", 0)


# --- from a task to tokens


def _shown(data: Inspected, task: Task) -> list[Shown]:
    learns = data.learns or _told(data.environment, task)
    if learns not in ROLES:
        tools = data.environment.tools(task) if isinstance(data.environment, HasTools) else None
        tokens = data.renderer.prompt(task.messages, tools or None)
        return [Shown(task, "prompt", tokens, [False] * len(tokens))]
    (group,) = asyncio.run(_source(data, learns).make([(task.id, task)], version=0))
    return [
        _of(task, part, row) for part, row in zip(ROLES[learns], group.trajectories, strict=True)
    ]


def _of(task: Task, part: str, row: Trajectory) -> Shown:
    return Shown(task, part, row.tokens.tolist(), row.trainable.tolist())


def _source(data: Inspected, learns: str) -> StreamSource:
    stream = TaskStream(data.environment, seed=data.seed)
    writer = TextRenderer(data.renderer, max_context=sys.maxsize)
    if learns == "rows":
        return SupervisedSource(
            stream, "inspect", writer, train="last" if data.turns == "last" else "all"
        )
    if learns == "labelled":
        return LabelledSource(stream, "inspect", writer, reference_rows=False)
    return (PairSource if learns == "pairs" else SteppedSource)(stream, "inspect", writer)


def _told(environment: Environment, task: Task) -> str:
    """Return what a row offers, for data without an algorithm."""
    ways = (
        ("pairs", HasPreferencePairs, "comparison"),
        ("labelled", HasLabelledAnswers, "judged"),
        ("steps", HasStepLabels, "steps"),
    )
    for learns, protocol, method in ways:
        if isinstance(environment, protocol):
            try:
                getattr(environment, method)(task)
            except DataError:
                continue
            return learns
    try:
        environment.demonstration(task)
    except DataError:
        return "rollouts"
    return "rows"


# --- what is written


def lengths(shown: Sequence[Shown]) -> dict[str, dict[str, float]]:
    """Return, for each part, the count, the quantiles of its tokens, and the share of tokens that
    train."""
    summary: dict[str, dict[str, float]] = {}
    for part in dict.fromkeys(one.part for one in shown):
        ones = [one for one in shown if one.part == part]
        sizes = [len(one.tokens) for one in ones]
        quantiles = {
            name: float(np.quantile(sizes, q, method="nearest")) for name, q in QUANTILES.items()
        }
        trained = sum(sum(one.trainable) for one in ones) / max(sum(sizes), 1)
        summary[part] = {
            "count": len(ones),
            **quantiles,
            "tokens": sum(sizes),
            "trainable_share": round(trained, 4),
        }
    return summary


def _show(
    console: Console, first: Sequence[Shown], shown: Sequence[Shown], renderer: Renderer
) -> None:
    for one in first:
        trained = sum(one.trainable)
        what = f"{len(one.tokens)} tokens, {trained} of them train"
        console.rule(f"{escape(one.task.id)} · {one.part} · {what}", align="left")
        console.print(_coloured(one, renderer, marks=not console.is_terminal), soft_wrap=True)
    if any(sum(one.trainable) for one in first):
        console.print(
            "[bold green]green[/]: what trains"
            if console.is_terminal
            else "between ⟦ and ⟧: what trains"
        )
    table = Table("", "rows", *QUANTILES, "trainable", title="tokens a row")
    for part, numbers in lengths(shown).items():
        share = f"{100 * numbers['trainable_share']:.1f} %"
        table.add_row(
            part, f"{numbers['count']:.0f}", *(f"{numbers[name]:.0f}" for name in QUANTILES), share
        )
    console.print(table)


def _coloured(one: Shown, renderer: Renderer, *, marks: bool) -> Text:
    """Return the text in colours. marks: brackets too, for output without colours."""
    text = Text()
    for trains, start, end in one.spans():
        # rich drops a bell
        decoded = escape_controls(
            renderer.tokenizer.decode(one.tokens[start:end], skip_special=False)
        )
        text.append(
            f"⟦{decoded}⟧" if trains and marks else decoded, style="bold green" if trains else "dim"
        )
    return text
