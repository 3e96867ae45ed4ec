"""The commands `ratchet data ...`. Imports no heavy modules, like `ratchet.cli.main`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ratchet.cli.errors import require_finite

data = typer.Typer(no_args_is_help=True, help="Look at data before training on them.")


@data.command()
def inspect(
    target: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE_OR_DATA",
            help="A recipe; or a file, a directory, an address, or a preset's name.",
        ),
    ],
    keys: Annotated[
        list[str] | None,
        typer.Argument(
            help="Overrides of the recipe; for data, keys of the environment `dataset`: "
            "columns={prompt: question}"
        ),
    ] = None,
    rows: Annotated[int, typer.Option(min=0, help="Rows to show.")] = 3,
    sample: Annotated[int, typer.Option(min=1, help="Rows in the statistics of lengths.")] = 256,
    test: Annotated[
        bool,
        typer.Option("--test", help="Show the test split instead of the training split."),
    ] = False,
    stage: Annotated[
        str | None, typer.Option(help="Stage of the recipe; default: the first one.")
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            metavar="DIR_OR_HUB_ID",
            help="Tokenizer; default: the recipe's, or the byte tokenizer for data.",
        ),
    ] = None,
    template: Annotated[
        str | None,
        typer.Option(
            help="Chat template: plain, turns, chatml, or a .jinja file; default: the recipe's, or "
            "turns for data (chatml for data with tools)."
        ),
    ] = None,
    json: Annotated[
        bool,
        typer.Option(
            "--json", help="Print one JSON object: rows with token ids and spans, and lengths."
        ),
    ] = False,
) -> None:
    """Show rows as the model will see them, which of their tokens train, and how long they are."""
    from ratchet.commands.inspect_data import inspect as inspect_data

    options = {"stage": stage, "tokenizer": tokenizer, "template": template, "as_json": json}
    inspect_data(
        target, keys or [], rows=rows, sample=sample, split="test" if test else "train", **options
    )


@data.command("swe-tasks")
def swe_tasks(
    rows: Annotated[
        str, typer.Argument(metavar="FILE", help="Rows with the columns of SWE-bench's datasets.")
    ],
    out: Annotated[
        Path,
        typer.Option(
            metavar="DIR", file_okay=False, help="Directory of the task directories; new or empty."
        ),
    ],
    repos: Annotated[
        Path,
        typer.Option(
            metavar="DIR", help="Directory of the repositories' clones: owner/name or owner__name."
        ),
    ],
    command: Annotated[
        str, typer.Option(help="Shell command that starts pytest.")
    ] = "python -m pytest",
    timeout_s: Annotated[
        float,
        typer.Option(
            min=1, callback=require_finite, help="Time limit of a task's tests in seconds."
        ),
    ] = 1800.0,
) -> None:
    """Write rows of SWE-bench's form as task directories, for the environment `harbor`."""
    from ratchet.environments.harbor.swe_rows import write_swe_tasks

    count = write_swe_tasks(rows, out, repositories=repos, command=command, timeout_s=timeout_s)
    typer.echo(f"wrote {count} tasks to {out}; next: ratchet eval oracle --on harbor test={out}")


@data.command("trajectories")
def trajectories(
    source: Annotated[
        Path,
        typer.Argument(metavar="PATH", help="A trajectory (.json), or a directory of them."),
    ],
    out: Annotated[
        Path, typer.Option(metavar="FILE", dir_okay=False, help="File of the rows (.jsonl); new.")
    ],
) -> None:
    """Write trajectories of ATIF or OpenEnv's TrainingTrace as rows, one for each answer."""
    from ratchet.commands.trajectory_rows import write_rows

    count = write_rows(source, out)
    typer.echo(f"wrote {count} rows to {out}; next: ratchet data inspect {out}")
