"""The commands `ratchet runs ...`. They import little, like `ratchet.cli.main`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ratchet.cli.completion import complete_run
from ratchet.errors import ConfigError

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
runs = typer.Typer(
    help="List runs, compare them, remove runs and checkpoints.", no_args_is_help=True
)


@runs.command("list")
def list_runs(
    place: Annotated[
        str, typer.Argument(help="A run, or a directory of runs, or an address of either.")
    ] = "runs",
    json: Json = False,
) -> None:
    """List runs with state, steps, accuracy and size."""
    from ratchet.commands.runs import list_runs as show

    show(place, as_json=json)


@runs.command("compare")
def compare_runs(
    paths: Annotated[
        list[str],
        typer.Argument(metavar="RUN RUN...", help="Two or more runs.", autocompletion=complete_run),
    ],
    json: Json = False,
) -> None:
    """Show how the recipes of runs differ, the first step with different metrics, and the last
    metrics."""
    from ratchet.commands.runs import compare_runs as show

    if len(paths) < 2:
        raise ConfigError(f"{paths[0]} is the only run: name a second run to compare it with")
    show(paths, as_json=json)


@runs.command("clean")
def clean_runs(
    place: Annotated[str, typer.Argument(help="A run, or a directory of runs.")] = "runs",
    yes: Annotated[
        bool, typer.Option("--yes", help="Remove the runs without asking for confirmation.")
    ] = False,
) -> None:
    """Remove runs that never finished a step."""
    from ratchet.commands.runs import clean_runs as clean
    from ratchet.runs.resolve import require_local_run

    clean(require_local_run(place), confirmed=yes)


@runs.command("prune")
def prune_runs(
    place: Annotated[str, typer.Argument(help="A run, or a directory of runs.")] = "runs",
    keep: Annotated[
        int,
        typer.Option(
            min=1,
            help="Number of newest checkpoints to keep per run, besides those that the recipe "
            "keeps (keep_best, keep_every).",
        ),
    ] = 1,
    yes: Annotated[
        bool, typer.Option("--yes", help="Remove the checkpoints; without it they are only listed.")
    ] = False,
) -> None:
    """Remove old checkpoints."""
    from ratchet.commands.runs import prune_runs as prune
    from ratchet.runs.resolve import require_local_run

    prune(require_local_run(place), keep=keep, confirmed=yes)


@runs.command("trajectories")
def export_trajectories(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run.")],
    out: Annotated[
        Path,
        typer.Option(metavar="DIR", file_okay=False, help="Directory of the files; new or empty."),
    ],
    step: Annotated[int | None, typer.Option(help="Only this step.")] = None,
) -> None:
    """Write recorded rollouts, a file each, in Harbor's trajectory format (ATIF)."""
    from ratchet.commands.atif import export_trajectories as export
    from ratchet.runs.resolve import require_local_run

    count = export(require_local_run(run), out, step)
    typer.echo(f"wrote {count} trajectories to {out}")
