"""The command `ratchet train`."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from ratchet.cli.completion import complete_key, complete_recipe, complete_run
from ratchet.cli.errors import WRONG_INPUT, require_finite
from ratchet.cli.recipes import describe_choices
from ratchet.errors import ConfigError
from ratchet.utils.terminal_text import escape_controls

Recipe = Annotated[
    str | None,  # not a path, which would drop the "./" of "./quickstart"
    typer.Argument(
        help="A recipe (YAML, or a name of `ratchet recipes`); none with --resume.",
        autocompletion=complete_recipe,
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        help="Overrides of any key: algorithm.group_size=16", autocompletion=complete_key
    ),
]
Resume = Annotated[
    str | None,
    typer.Option(
        help="Continue the run in this directory or at this address. Overrides given with it "
        "change the run's recipe.",
        autocompletion=complete_run,
    ),
]
StartFrom = Annotated[
    str | None,
    typer.Option(
        "--from",
        metavar="RUN[@STEP]",
        autocompletion=complete_run,
        help="Start from the weights of this run: of its end, or of the checkpoint of STEP.",
    ),
]
Profile = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help="Profile N steps after a warm-up: writes a trace and a table to profile/.",
    ),
]
RunDir = Annotated[
    str | None,
    typer.Option(help="Directory of the run, or s3://bucket/run; default: runs/<name>-<number>."),
]
TryTime = Annotated[
    float | None,
    typer.Option(
        "--try",
        min=0,
        metavar="SECONDS",
        callback=require_finite,
        help="Only try the recipe: limit each stage's time.",
    ),
]


def train(
    recipe: Recipe = None,
    overrides: Overrides = None,
    run_dir: RunDir = None,
    resume: Resume = None,
    start_from: StartFrom = None,
    with_optimizer: Annotated[
        bool,
        typer.Option("--with-optimizer", help="With --from: take over the optimizer's state too."),
    ] = False,
    changed_data: Annotated[
        bool,
        typer.Option(
            "--changed-data",
            help="With --resume: continue even if data, judges or teachers have changed.",
        ),
    ] = False,
    profile: Profile = None,
    try_s: TryTime = None,
    try_steps: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Only try the recipe: end each stage after N steps."),
    ] = None,
) -> None:
    """Train with a recipe, or continue an interrupted run."""
    changes = list(overrides or [])
    # With --resume the first argument is not a recipe but a key to change.
    if resume is not None and recipe is not None and "=" in recipe:
        changes, recipe = [recipe, *changes], None
    if recipe is None and resume is None:
        typer.echo(escape_controls(describe_choices()), err=True)
        raise typer.Exit(WRONG_INPUT)
    if recipe is not None and resume is not None:
        raise ConfigError("give a recipe, or --resume RUN_DIRECTORY, but not both")
    new_run_options = {
        "--run-dir": run_dir,
        "--try": try_s,
        "--try-steps": try_steps,
        "--from": start_from,
    }
    _refuse_on_resume(
        [name for name, value in new_run_options.items() if value is not None], resume
    )
    if changed_data and resume is None:
        raise ConfigError(
            "--changed-data is only for a run that continues: give --resume RUN_DIRECTORY, or "
            "remove it"
        )
    if with_optimizer and start_from is None:
        raise ConfigError(
            "--with-optimizer is only for --from RUN: give --from too, or remove --with-optimizer"
        )
    # Set before torch is imported, because torch's tracer would print progress notes.
    if profile is not None:
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    from ratchet.training.start import resume_run, start_run

    command = " ".join(["ratchet", *sys.argv[1:]])
    if resume is not None:
        status = resume_run(
            resume, changes, command=command, profile=profile, changed_data=changed_data
        )
        raise typer.Exit(status)
    assert recipe is not None
    settings = {
        "profile": profile,
        "try_s": try_s,
        "try_steps": try_steps,
        "start_from": start_from,
    }
    raise typer.Exit(
        start_run(
            recipe, changes, run_dir, command=command, with_optimizer=with_optimizer, **settings
        )
    )


def _refuse_on_resume(options: list[str], resume: str | None) -> None:
    """Raise ConfigError for options of a new run, if a run is resumed."""
    if options and resume is not None:
        raise ConfigError(f"{options[0]} is only for a new run: remove it, or remove --resume")
