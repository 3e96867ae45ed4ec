"""The summary of a run: `summary.json`, and tables of accuracy and loss before and after it."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from ratchet.errors import DISTRIBUTION
from ratchet.observe.progress import format_duration
from ratchet.observe.write_files import replace_text


def get_installed_versions() -> dict[str, str | None]:
    """Return the versions of packages that results depend on; None for a missing package.

    The packages are not imported.
    """

    def find_version(package: str) -> str | None:
        try:
            return version(package)
        except PackageNotFoundError:
            return None

    return {
        "ratchet": find_version(DISTRIBUTION),
        "torch": find_version("torch"),
        "transformers": find_version("transformers"),
        "python": platform.python_version(),
    }


@dataclass(frozen=True, slots=True)
class StageSummary:
    """The summary of one stage.

    Args:
        seconds: training time, without evaluation and saving.
        accuracy_before, accuracy_after: held-out accuracy, the mean reward; None if it was not
            measured.
        is_share: True if every reward is from 0 to 1, so that their mean can be shown as a
            percentage.
        loss_before, loss_after: held-out loss; None if it was not measured.
        trained_tokens: number of tokens with a loss.
        generated_tokens: number of sampled tokens (0 in a supervised stage).
        computed_tokens: number of tokens of all rows of the steps' groups, prompts included, also
            of rows without a loss.
    """

    name: str
    algorithm: str
    steps: int
    seconds: float
    accuracy_before: float | None
    accuracy_after: float | None
    trained_tokens: float = 0.0
    generated_tokens: float = 0.0
    loss_before: float | None = None
    loss_after: float | None = None
    is_share: bool = True
    computed_tokens: float = 0.0

    @property
    def tokens_per_s(self) -> dict[str, float | None]:
        counts = {
            "trained": self.trained_tokens,
            "generated": self.generated_tokens,
            "computed": self.computed_tokens,
        }
        return {
            kind: count / self.seconds if self.seconds > 0 else None
            for kind, count in counts.items()
        }

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "algorithm": self.algorithm,
            "steps": self.steps,
            "seconds": self.seconds,
            "accuracy_before": _get_finite(self.accuracy_before),
            "accuracy_after": _get_finite(self.accuracy_after),
            "is_share": self.is_share,
            "loss_before": _get_finite(self.loss_before),
            "loss_after": _get_finite(self.loss_after),
            "tokens_per_s": self.tokens_per_s,
        }


@dataclass(frozen=True, slots=True)
class RunSummary:
    """The summary of a run.

    peak_mib: peak memory in MiB of the process that finished the run; None: not measured.
    """

    stages: tuple[StageSummary, ...]
    command: str
    seed: int
    threads: int
    device: str
    versions: Mapping[str, str | None] = field(default_factory=get_installed_versions)
    peak_mib: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the contents of `summary.json`."""
        return {
            "stages": [stage.as_dict() for stage in self.stages],
            "command": self.command,
            "seed": self.seed,
            "versions": dict(self.versions),
            "threads": self.threads,
            "device": self.device,
            "peak_mib": self.peak_mib,
        }

    def write(self, path: Path) -> None:
        """Replace the file as a whole. Raises OSError."""
        replace_text(path, json.dumps(self.as_dict(), indent=2, allow_nan=False) + "\n")

    def make_tables(self) -> list[Table]:
        """Return the table of accuracy, of loss, or both.

        The first table has every stage, also those without evaluation. A second table, that of
        loss, has only the stages that measure a loss.
        """
        has_accuracy = any(_is_measured(s.accuracy_before, s.accuracy_after) for s in self.stages)
        stages_with_loss = [s for s in self.stages if _is_measured(s.loss_before, s.loss_after)]
        tables = []
        if has_accuracy or not stages_with_loss:
            is_share = all(stage.is_share for stage in self.stages)
            title = "Held-out accuracy" if is_share else "Held-out reward"
            rows = [_make_accuracy_row(stage, is_share) for stage in self.stages]
            tables.append(_make_table(title, rows))
        if stages_with_loss:
            stages = stages_with_loss if has_accuracy else self.stages
            tables.append(_make_table("Held-out loss", [_make_loss_row(stage) for stage in stages]))
        return tables


def _make_table(title: str, rows: Sequence[Sequence[str | Text]]) -> Table:
    table = Table(title=title)
    for heading in (
        "stage",
        "algorithm",
        "steps",
        "before",
        "after",
        "change",
        "training",
        "tokens/s",
    ):
        table.add_column(heading, justify="left" if heading in ("stage", "algorithm") else "right")
    for row in rows:
        table.add_row(*row)
    return table


def _make_accuracy_row(stage: StageSummary, is_share: bool) -> list[str | Text]:
    before = _get_finite(stage.accuracy_before)
    after = _get_finite(stage.accuracy_after)
    if not is_share:
        return _make_number_row(stage, before, after)
    change = f"{100 * (after - before):+.1f}" if before is not None and after is not None else "-"
    return _make_row(stage, _format_percent(before), _format_percent(after), change)


def _make_loss_row(stage: StageSummary) -> list[str | Text]:
    return _make_number_row(stage, _get_finite(stage.loss_before), _get_finite(stage.loss_after))


def _make_number_row(
    stage: StageSummary, before: float | None, after: float | None
) -> list[str | Text]:
    change = f"{after - before:+.3f}" if before is not None and after is not None else "-"
    return _make_row(stage, _format_number(before), _format_number(after), change)


def _make_row(stage: StageSummary, before: str, after: str, change: str) -> list[str | Text]:
    speed = stage.tokens_per_s["generated" if stage.generated_tokens else "computed"]
    return [
        # Text, because rich would read brackets in a stage's name as markup.
        Text(stage.name),
        Text(stage.algorithm),
        str(stage.steps),
        before,
        after,
        change,
        format_duration(stage.seconds),
        f"{speed:,.0f}" if speed is not None else "-",
    ]


def _is_measured(before: float | None, after: float | None) -> bool:
    return before is not None or after is not None


def _get_finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _format_percent(value: float | None) -> str:
    return f"{100 * value:.1f} %" if value is not None else "-"


def _format_number(value: float | None) -> str:
    return f"{value:.3f}" if value is not None else "-"
