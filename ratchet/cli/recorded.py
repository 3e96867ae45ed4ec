"""The commands that show existing runs: replay, explain, report, ui, watch and status.

Heavy modules are imported inside the commands, as in `ratchet.cli.main`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ratchet.cli.completion import complete_run
from ratchet.cli.errors import require_finite, say
from ratchet.cli.runs import Json

Steps = Annotated[
    list[int],
    typer.Option("--step", min=1, help="A recorded step; may be given several times."),
]
Run = Annotated[
    str,
    typer.Argument(
        metavar="RUN", help="A run directory, or an address.", autocompletion=complete_run
    ),
]


def replay(
    run: Run,
    step: Steps,
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Also compute each step with this key of the algorithm or optimizer changed, and "
            "compare; may be given several times.",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Compute recorded steps again. The exit status is 0 if the results are equal to the recorded
    ones bit for bit; otherwise it is 1, and the differences are printed."""
    from ratchet.commands.replay.command import replay_steps
    from ratchet.runs.resolve import fetch_run_for_replay

    raise typer.Exit(
        replay_steps(fetch_run_for_replay(run, step), step, changes=changes or [], as_json=json)
    )


def explain(
    run: Run,
    step: Annotated[int, typer.Option(min=1, help="A recorded step.")],
    role: Annotated[
        str, typer.Option(help="The model whose weights moved: policy or critic.")
    ] = "policy",
    top: Annotated[int, typer.Option(min=1, help="Number of groups and tokens to show.")] = 10,
    json: Json = False,
) -> None:
    """Show which groups, tags and tokens of a recorded step moved the weights. The exit status is 1
    if the step computed again differs from the recorded one; the differences are printed first."""
    from ratchet.commands.replay.explain import explain_step
    from ratchet.runs.resolve import fetch_run_for_replay

    raise typer.Exit(
        explain_step(fetch_run_for_replay(run, [step]), step, role=role, top=top, as_json=json)
    )


def report(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN...",
            help="Run directories or addresses; several are compared.",
            autocompletion=complete_run,
        ),
    ],
    out: Annotated[
        Path | None, typer.Option(help="The file; default: report.html in the first run.")
    ] = None,
    rollouts: Annotated[
        int,
        typer.Option(
            min=0, help="Number of rollouts of each run whose texts and tokens the file contains."
        ),
    ] = 256,
) -> None:
    """Write the curves, rollouts, token and time breakdown and differences of runs as one HTML
    file."""
    from ratchet.commands.report import write_report

    say(write_report(runs, out, rollouts=rollouts))


def ui(
    directory: Annotated[
        str, typer.Argument(help="A run, a directory that contains runs, or the address of a run.")
    ] = "runs",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port on this machine; 0: any free port.")
    ] = 8421,
) -> None:
    """Show runs in the browser while they train. Only this machine can connect; Ctrl-C ends the
    server."""
    from ratchet.commands.report.server import serve_forever
    from ratchet.runs.resolve import fetch_run_record

    serve_forever(fetch_run_record(directory), port, say=say)


def watch(
    run: Run,
    once: Annotated[bool, typer.Option("--once", help="Print one frame.")] = False,
    every: Annotated[
        float,
        typer.Option(
            min=0.1, metavar="SECONDS", callback=require_finite, help="Time between two frames."
        ),
    ] = 2.0,
) -> None:
    """Show a run in the terminal while it trains: curves, attempts, alarms, what it waits for, and
    the remaining time."""
    from ratchet.commands.report.watch import watch_run
    from ratchet.runs.resolve import fetch_run_record

    watch_run(fetch_run_record(run), once=once, every_s=every)


def status(
    run: Annotated[
        str,
        typer.Argument(
            help="The directory of a run that is training.", autocompletion=complete_run
        ),
    ],
) -> None:
    """Show which component of a training run waits for which other component, and since when."""
    from ratchet.runs.live_status import query_status
    from ratchet.runs.resolve import require_local_run

    say(query_status(require_local_run(run)))
