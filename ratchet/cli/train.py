"""The command `ratchet train`."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from ratchet.cli.completion import complete_key, complete_recipe, complete_run
from ratchet.cli.errors import WRONG_INPUT, require_finite
from ratchet.cli.recipes import describe_choices
from ratchet.errors import ConfigError
from ratchet.executors.env_vars import find_supervisor_pipe
from ratchet.executors.signals import stop_with_supervisor
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
Supervise = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help="Start the run again after a crash, at most N times in a row without a new "
        "checkpoint.",
    ),
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
    supervise: Supervise = None,
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
    _refuse_on_resume(new_run_options, resume)
    _refuse_without("--changed-data", changed_data, "--resume RUN_DIRECTORY", resume)
    _refuse_without("--with-optimizer", with_optimizer, "--from RUN", start_from)
    if supervise is not None:
        if try_s is not None:
            raise ConfigError(
                "--try limits the seconds of one start: give --try-steps with --supervise"
            )
        place = resume or run_dir or _choose_run_dir(recipe, changes, start_from)
        # The run may crash before it has written the changed keys. Given twice, they do nothing.
        resume_options = [*(["--changed-data"] * changed_data), *(changes if resume else ())]
        raise typer.Exit(_supervise(place, supervise, resume_options))
    supervisor_pipe = find_supervisor_pipe()
    if supervisor_pipe is not None:
        stop_with_supervisor(supervisor_pipe)
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


def _refuse_on_resume(options: Mapping[str, object], resume: str | None) -> None:
    """Raise ConfigError for options of a new run (by name; None: not given) if one is resumed."""
    given = [name for name, value in options.items() if value is not None]
    if given and resume is not None:
        raise ConfigError(f"{given[0]} is only for a new run: remove it, or remove --resume")


def _refuse_without(option: str, is_given: bool, needed: str, value: str | None) -> None:
    """Raise ConfigError for an option that is given without the one that it belongs to."""
    if is_given and value is None:
        raise ConfigError(f"{option} is only for {needed}: give that too, or remove {option}")


def _choose_run_dir(recipe: str | None, changes: list[str], start_from: str | None) -> str:
    """Return the directory or address in which a new run of a recipe trains."""
    from ratchet.config.loader import load_config
    from ratchet.runs.without_steps import find_free_run_dir

    assert recipe is not None
    option = "" if start_from is None else "--from"
    config = load_config(recipe, changes, model_path=start_from, model_option=option)
    return str(config.run_dir or find_free_run_dir(config.name))


def _supervise(place: str, max_restarts: int, resume_options: Sequence[str]) -> int:
    """Run this command in a child process, and `ratchet train --resume` after each crash.

    Args:
        place: The directory or address of the run.
        max_restarts: As of `Supervisor`.
        resume_options: Further arguments of each `ratchet train --resume`.

    Returns:
        The exit status of the last start.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise ConfigError(
            "--supervise can't start the processes of torchrun again: remove it, and give torchrun "
            "--max-restarts"
        )
    from ratchet.runs.remote_sync import get_mirror_work_dir
    from ratchet.training.supervise import Supervisor
    from ratchet.utils.object_store import is_address

    arguments = _remove_option(sys.argv[1:], "--supervise")
    names = {argument.partition("=")[0] for argument in arguments}
    if not names & {"--run-dir", "--resume"}:
        arguments[1:1] = ["--run-dir", place]  # after "train": behind "--" it would be no option
    supervisor = Supervisor(
        get_mirror_work_dir(place) if is_address(place) else Path(place),
        arguments,
        ["train", "--resume", place, *resume_options],
        max_restarts=max_restarts,
        say=lambda line: typer.echo(escape_controls(line), err=True),
    )
    return supervisor.run()


def _remove_option(arguments: list[str], name: str) -> list[str]:
    """Return command-line arguments without an option and its values (`--x 1` or `--x=1`)."""
    kept = [argument for argument in arguments if not argument.startswith(f"{name}=")]
    while name in kept:
        index = kept.index(name)
        del kept[index : index + 2]
    return kept
