"""The command `ratchet data inspect`: show data rows as the model sees them.

The chat template is applied to the rows, and the trained tokens are highlighted.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
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
from ratchet.data.chat.task_variables import get_task_renderer
from ratchet.data.chat.tokenizer_loading import load_tokenizer
from ratchet.data.presets.lookup import PUBLISHED
from ratchet.environments.build import build_environment
from ratchet.errors import ConfigError, DataError
from ratchet.experience.sources.render_task import render_task
from ratchet.protocols import Environment
from ratchet.training.from_config import build_renderer, load_policy_processor
from ratchet.types import Split, Task, Trajectory
from ratchet.utils.terminal_text import escape_controls, make_console

# The names of a row's token sequences, by kind of data.
PARTS_BY_DATA_KIND = {
    "pairs": ("chosen", "rejected"),
    "labelled": ("answer",),
    "steps": ("answer",),
    "rows": ("row",),
}
QUANTILES = {"least": 0.0, "median": 0.5, "p95": 0.95, "most": 1.0}


@dataclass(frozen=True)
class TokenSequence:
    """A token sequence of a task, with the tokens that train."""

    task: Task
    part: str  # "row", "turn N", "chosen", "rejected", "answer" or "prompt"
    tokens: Sequence[int]
    trainable: Sequence[bool]  # one entry per token

    def iter_spans(self) -> Iterator[tuple[bool, int, int]]:
        """Yield (trains, start, end) for each maximal run of tokens with the same `trainable`."""
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
            "spans": [[start, end] for trains, start, end in self.iter_spans() if trains],
            "text": renderer.tokenizer.decode(self.tokens, skip_special=False),
            "ids": [int(token) for token in self.tokens],
            "answer": self.task.answer,
        }


@dataclass(frozen=True)
class DataSetup:
    """The data to show, and the renderer that a run on these data would use."""

    environment: Environment
    renderer: Renderer
    # The kind of data that the algorithm learns from (see `StageConfig.source`); None: it is
    # detected for each row.
    data_kind: str | None
    turns: str  # `Algorithm.turns`
    seed: int
    history_window: int | None = None  # `rollouts.history_window`


def inspect(
    target: str,
    overrides: Sequence[str],
    *,
    rows: int,
    sample: int,
    split: Split,
    stage: str | None,
    tokenizer: str | None,
    template: str | None,
    as_json: bool,
) -> None:
    """Print the first `rows` rows, and length statistics of the first `sample` rows, to stdout.

    Raises ConfigError or DataError if the recipe or the data can't be used.
    """
    data = (
        _setup_recipe(target, overrides, stage)
        if target.endswith((".yaml", ".yml"))
        else _setup_file(target, overrides)
    )
    if tokenizer is not None or template is not None:
        chosen_tokenizer = (
            data.renderer.tokenizer if tokenizer is None else load_tokenizer(tokenizer)
        )
        data = replace(data, renderer=Renderer(chosen_tokenizer, template))
    tasks = islice(
        _take_first_epoch(data.environment.tasks(split, seed=data.seed)), max(rows, sample)
    )
    sequences = [sequence for task in tasks for sequence in _render_task(data, task)]
    printed_ids = list(dict.fromkeys(sequence.task.id for sequence in sequences))[:rows]
    printed_sequences = [sequence for sequence in sequences if sequence.task.id in printed_ids]
    if as_json:
        report = {
            "rows": [sequence.as_json(data.renderer) for sequence in printed_sequences],
            "lengths": summarise_lengths(sequences),
        }
        sys.stdout.write(json.dumps(report) + "\n")
    else:
        _print_report(make_console(), printed_sequences, sequences, data.renderer)


def _take_first_epoch(tasks: Iterator[Task]) -> Iterator[Task]:
    """Yield tasks until one repeats, which is where the second epoch begins."""
    seen_ids: set[str] = set()
    for task in tasks:
        if task.id in seen_ids:
            return
        seen_ids.add(task.id)
        yield task


# --- loading the data


def _setup_recipe(recipe: str, overrides: Sequence[str], stage: str | None) -> DataSetup:
    """Return the data of a recipe's stage; None takes the first stage."""
    config = load_config(recipe, overrides)
    stage_config = _select_stage(config, stage)
    tokenizer = build(config.tokenizer, config.model.path)
    # Only a local model directory is used: showing rows must not download a model.
    processor = (
        load_policy_processor(config)
        if config.model.path and Path(config.model.path).is_dir()
        else None
    )
    renderer = build_renderer(config, tokenizer, processor)
    turns = build(stage_config.algorithm).turns
    return DataSetup(
        build_environment(stage_config.environment),
        renderer,
        stage_config.source,
        turns,
        config.seed,
        stage_config.rollouts.history_window,
    )


def _select_stage(config: RunConfig, name: str | None) -> StageConfig:
    """Return the stage called `name`, or the first stage for None."""
    if name is None:
        return config.stages[0]
    stage = next((stage for stage in config.stages if stage.name == name), None)
    if stage is None:
        raise ConfigError(
            f"there is no stage '{name}': there are "
            f"{', '.join(stage.name for stage in config.stages)}"
        )
    return stage


def _setup_file(target: str, overrides: Sequence[str]) -> DataSetup:
    """Return the data of a file, a directory, an address or a preset.

    Args:
        target: The file, directory or address, or the name of the preset.
        overrides: `key=value` settings of the environment `dataset`.
    """
    key = "preset" if target in PUBLISHED and not Path(target).exists() else "train"
    section = section_from_words(
        "environment", "dataset", [f"{key}={json.dumps(target)}", *overrides]
    )
    environment = build_environment(section)
    # The template "turns" can't render tools.
    template = "chatml" if environment.has_tools else "turns"
    return DataSetup(environment, Renderer(byte_tokenizer(), template), None, "all", 0)


# --- rendering tasks as tokens


def _render_task(data: DataSetup, task: Task) -> list[TokenSequence]:
    """Return the token sequences of a task; for rollouts, its prompt alone."""
    data_kind = data.data_kind or _detect_data_kind(data.environment, task)
    if data_kind not in PARTS_BY_DATA_KIND:
        renderer = get_task_renderer(data.renderer, task)
        tokens = renderer.prompt(task.messages, data.environment.tools(task) or None)
        return [TokenSequence(task, "prompt", tokens, [False] * len(tokens))]
    trajectories = render_task(
        data.environment,
        task,
        data.renderer,
        data_kind,
        turns=data.turns,
        history_window=data.history_window,
    )
    parts = PARTS_BY_DATA_KIND[data_kind]
    if data_kind == "rows" and data.history_window is not None:
        parts = tuple(f"turn {i + 1}" for i in range(len(trajectories)))
    return [
        _from_trajectory(task, part, trajectory)
        for part, trajectory in zip(parts, trajectories, strict=True)
    ]


def _from_trajectory(task: Task, part: str, trajectory: Trajectory) -> TokenSequence:
    return TokenSequence(task, part, trajectory.tokens.tolist(), trajectory.trainable.tolist())


def _detect_data_kind(environment: Environment, task: Task) -> str:
    """Return the kind of data that a row holds, for a command without an algorithm.

    The values are those of `StageConfig.source`.
    """
    kinds = (
        ("pairs", environment.comparison),
        ("labelled", environment.labelled_answer),
        ("steps", environment.steps),
        ("rows", environment.demonstration),
    )
    for data_kind, read_answer in kinds:
        try:
            read_answer(task)
        except DataError:
            continue
        return data_kind
    return "rollouts"


# --- output


def summarise_lengths(all_sequences: Sequence[TokenSequence]) -> dict[str, dict[str, float]]:
    """Return length statistics of each part ("row", "chosen", ...).

    The statistics are the number of sequences, quantiles of their token counts, the sum of tokens
    and the share of tokens that train (0 to 1).
    """
    summary: dict[str, dict[str, float]] = {}
    for part in dict.fromkeys(sequence.part for sequence in all_sequences):
        sequences = [sequence for sequence in all_sequences if sequence.part == part]
        token_counts = [len(sequence.tokens) for sequence in sequences]
        quantiles = {
            name: float(np.quantile(token_counts, q, method="nearest"))
            for name, q in QUANTILES.items()
        }
        n_trainable = sum(sum(sequence.trainable) for sequence in sequences)
        summary[part] = {
            "count": len(sequences),
            **quantiles,
            "tokens": sum(token_counts),
            "trainable_share": round(n_trainable / max(sum(token_counts), 1), 4),
        }
    return summary


def _print_report(
    console: Console,
    printed_sequences: Sequence[TokenSequence],
    sequences: Sequence[TokenSequence],
    renderer: Renderer,
) -> None:
    """Print `printed_sequences`, and a table of the lengths of all `sequences`."""
    for sequence in printed_sequences:
        n_trainable = sum(sequence.trainable)
        token_summary = f"{len(sequence.tokens)} tokens, {n_trainable} of them train"
        console.rule(
            f"{escape(sequence.task.id)} · {sequence.part} · {token_summary}", align="left"
        )
        console.print(
            _colour_tokens(sequence, renderer, add_brackets=not console.is_terminal), soft_wrap=True
        )
    if any(sum(sequence.trainable) for sequence in printed_sequences):
        console.print(
            "[bold green]green[/]: tokens that train"
            if console.is_terminal
            else "between ⟦ and ⟧: tokens that train"
        )
    table = Table("", "rows", *QUANTILES, "trainable", title="tokens a row")
    for part, statistics in summarise_lengths(sequences).items():
        share = f"{100 * statistics['trainable_share']:.1f} %"
        table.add_row(
            part,
            f"{statistics['count']:.0f}",
            *(f"{statistics[name]:.0f}" for name in QUANTILES),
            share,
        )
    console.print(table)


def _colour_tokens(sequence: TokenSequence, renderer: Renderer, *, add_brackets: bool) -> Text:
    """Return the sequence's text with trained tokens in green.

    Args:
        sequence: The tokens.
        renderer: The renderer whose tokenizer decodes them.
        add_brackets: True also puts brackets around trained tokens, for output without colours.
    """
    text = Text()
    for trains, start, end in sequence.iter_spans():
        # Control characters must not reach the terminal. They are replaced by their codes, because
        # rich would silently drop some of them, such as the bell.
        decoded = escape_controls(
            renderer.tokenizer.decode(sequence.tokens[start:end], skip_special=False)
        )
        text.append(
            f"⟦{decoded}⟧" if trains and add_brackets else decoded,
            style="bold green" if trains else "dim",
        )
    return text
