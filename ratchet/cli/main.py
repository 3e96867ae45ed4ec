"""The command line.

Heavy modules are imported inside the commands, so that `ratchet --help` never imports torch.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperGroup

import ratchet
from ratchet.cli.completion import complete_recipe, complete_run
from ratchet.cli.convert import convert
from ratchet.cli.data import data
from ratchet.cli.errors import (
    exit_with_error,
    is_reader_gone,
    prepare_streams,
    require_finite,
    say,
)
from ratchet.cli.evaluation import evaluate
from ratchet.cli.new import new
from ratchet.cli.push import push
from ratchet.cli.recipes import recipes
from ratchet.cli.recorded import explain, replay, report, status, ui, watch
from ratchet.cli.runs import Json, runs
from ratchet.cli.train import Overrides, train
from ratchet.errors import ConfigError, DataError
from ratchet.utils import credentials, failpoints, object_store
from ratchet.utils.user_code import fail_early_exits


class Commands(TyperGroup):
    """The group of all commands, which reports a broken pipe to a worker process as an error.

    Typer assumes that every BrokenPipeError means that the reader of stdout has ended, and exits
    with status 1 without a message. A killed worker process causes a BrokenPipeError too.
    """

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:
            if is_reader_gone():
                raise
            raise ConnectionError("the connection to another process broke") from error


app = typer.Typer(
    cls=Commands, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None
)

app.add_typer(data, name="data")
app.add_typer(recipes, name="recipes")
app.add_typer(runs, name="runs")

IMPORT_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
Target = Annotated[
    str,
    typer.Argument(
        help="A run directory or a Hugging Face model directory, or the address of one "
        "(s3://bucket/run).",
        autocompletion=complete_run,
    ),
]


def show_version(is_wanted: bool) -> None:
    if is_wanted:
        say(f"ratchet {ratchet.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Show the version and exit.", is_eager=True, callback=show_version
        ),
    ] = False,
) -> None:
    """Post-train language models: supervised, by preferences, and by reinforcement learning."""


app.command()(train)


@app.command()
def check(
    target: Annotated[
        str,
        typer.Argument(
            help="A recipe (YAML, or a name of `ratchet recipes`), or the import path of an "
            "algorithm, an environment or a reward",
            autocompletion=complete_recipe,
        ),
    ],
    overrides: Overrides = None,
    offline: Annotated[
        bool,
        typer.Option(
            "--offline", help="Open nothing that the recipe names: no model, data or rewards."
        ),
    ] = False,
) -> None:
    """Validate a recipe, show its batch arithmetic and open what it names, or check a class of
    your own (my_pkg.my_mod:MyClass)."""
    if IMPORT_PATH.fullmatch(target) and not Path(target).exists():
        from ratchet.testing.check_command import check_named

        table, passed = check_named(target, overrides or [])
        say(table)
        raise typer.Exit(not passed)
    from ratchet.commands.describe_recipe import describe
    from ratchet.config.loader import load_config
    from ratchet.executors.threads import describe_threads

    config = load_config(target, overrides or [])
    if offline:
        say(describe(config, threads=describe_threads()))
    else:
        from ratchet.experience.sources.passes import describe_passes
        from ratchet.training.preflight import run_preflight

        report = run_preflight(config)
        say(describe(*describe_passes(config), threads=describe_threads()))
        say("\n" + "\n".join(["opened", *(f"  {line}" for line in report.opened)]))
        for warning in report.warnings:
            say(f"  warning: {warning}")
        report.raise_problems()


@app.command(name="explain-algorithm")
def explain_algorithm(
    kind: Annotated[
        str,
        typer.Argument(
            help="A built-in name (grpo), or the import path of a class (my_pkg.mod:MyConfig)."
        ),
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Keys of the algorithm: group_size=16 kl.coef=0.04")
    ] = None,
) -> None:
    """Show what an algorithm consists of: its estimator, loss, aggregation, sources and keys."""
    from ratchet.commands.explain_algorithm import explain_algorithm as get_explanation

    say(get_explanation(kind, overrides or []))


@app.command(name="help")
def explain_key(
    key: Annotated[
        list[str] | None,
        typer.Argument(
            help="A key (optimizer.lr), a section, a kind (dapo), another library's name of a key "
            "(num_generations), or words of its description."
        ),
    ] = None,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print all keys, as in docs/recipe.md.")
    ] = False,
) -> None:
    """Explain a key, a section or a kind of a recipe."""
    from ratchet.commands.help.command import make_help_text
    from ratchet.commands.help.page import make_recipe_page

    say(make_recipe_page().rstrip() if markdown else make_help_text(" ".join(key or [])))


@app.command()
def schema() -> None:
    """Print the JSON schema of recipes, which lets editors complete and check their keys."""
    from json import dumps

    from ratchet.commands.help.json_schema import make_recipe_schema

    say(dumps(make_recipe_schema(), indent=1))


@app.command()
def plan(
    recipe: Annotated[
        str,
        typer.Argument(
            help="A recipe (YAML, or a name of `ratchet recipes`).",
            autocompletion=complete_recipe,
        ),
    ],
    overrides: Overrides = None,
    probe: Annotated[
        float | None,
        typer.Option(
            min=1,
            metavar="SECONDS",
            callback=require_finite,
            help="Train each stage for this time and measure its steps.",
        ),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            metavar="2x8xH100", help="Plan for these accelerators: nodes x accelerators x kind."
        ),
    ] = None,
    run_dir: Annotated[
        str | None,
        typer.Option(
            help="Save the plan in this run directory; the run's report then compares the plan "
            "with the measurements."
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Predict memory and time of a recipe before training."""
    from ratchet.commands.plan.show import show_plan
    from ratchet.config.loader import load_config
    from ratchet.runs.resolve import resolve_run_dir
    from ratchet.runs.run_dir import RunDirectory

    config = load_config(recipe, overrides or [])
    directory = None if run_dir is None else RunDirectory(resolve_run_dir(run_dir))
    show_plan(config, cluster=cluster, probe_s=probe, directory=directory, as_json=json)


app.command(name="eval")(evaluate)


@app.command()
def chat(
    target: Target,
    prompt: Annotated[
        list[str] | None,
        typer.Option(help="A question to answer before exiting; may be given several times."),
    ] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Maximum tokens of an answer.")] = 256,
    seed: Annotated[int, typer.Option(help="Seed of the sampled answers.")] = 0,
) -> None:
    """Talk to a trained model."""
    from ratchet.commands.chat import chat_with
    from ratchet.runs.resolve import fetch_run_model

    chat_with(
        fetch_run_model(target),
        prompts=prompt or [],
        temperature=temperature,
        max_new_tokens=max_new_tokens,
        seed=seed,
    )


@app.command()
def serve(
    target: Target,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any free port.")
    ] = 8000,
    host: Annotated[
        str,
        typer.Option(
            help="Address to listen on. An address that other machines can reach needs --api-key."
        ),
    ] = "127.0.0.1",
    api_key: Annotated[
        str,
        typer.Option(envvar="RATCHET_API_KEY", help="Key that requests must send; default: none."),
    ] = "",
    temperature: Annotated[
        float, typer.Option(help="Temperature of requests that set none.")
    ] = 1.0,
    max_new_tokens: Annotated[
        int, typer.Option(min=1, help="Maximum tokens of an answer, for every request.")
    ] = 1024,
) -> None:
    """Serve a trained model, under the name `policy`, behind the APIs of OpenAI and Anthropic."""
    from ratchet.commands.serve import serve as serve_model
    from ratchet.runs.resolve import fetch_run_model
    from ratchet.types import Sampling

    serve_model(
        fetch_run_model(target),
        host=host,
        port=port,
        key=api_key,
        sampling=Sampling(temperature, max_new_tokens=max_new_tokens),
        say=say,
    )


@app.command("serve-env")
def serve_env(
    target: Annotated[
        str, typer.Argument(help="A recipe, or a kind of environment such as sorting.")
    ],
    keys: Annotated[list[str] | None, typer.Argument(help="Keys of the kind: digits=4")] = None,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any free port.")
    ] = 8000,
    host: Annotated[
        str, typer.Option(help="Address to listen on. Every client that reaches it can play.")
    ] = "127.0.0.1",
    sessions: Annotated[int, typer.Option(min=1, help="Maximum number of sessions.")] = 64,
) -> None:
    """Serve an environment by OpenEnv's protocol, to be played by its clients."""
    from ratchet.commands.serve_env import serve_environment

    serve_environment(target, keys or [], host=host, port=port, sessions=sessions, say=say)


@app.command()
def score(
    file: Annotated[
        str,
        typer.Argument(
            help="JSON lines: prompt, response, answer; or response and the columns that the "
            "reward reads. Or a run, whose recorded attempts are judged again."
        ),
    ],
    keys: Annotated[
        list[str] | None, typer.Argument(help="Keys of the reward: timeout_s=5")
    ] = None,
    reward: Annotated[
        str,
        typer.Option(
            help="A kind of reward, or the import path of yours: my_pkg.my_mod:my_reward; default "
            "for a run: the rewards of its recipe."
        ),
    ] = "",
    step: Annotated[
        list[int] | None,
        typer.Option(
            min=1,
            help="For a run: judge only this step; may be given several times; default: all steps.",
        ),
    ] = None,
    json: Annotated[
        bool,
        typer.Option("--json", help="Print a line of JSON for each row instead of the summary."),
    ] = False,
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="Rows judged at once; default: the cores of this machine."),
    ] = None,
) -> None:
    """Apply a reward to the answers in a file, or in the record of a run."""
    from ratchet.commands.score import score_file
    from ratchet.executors.threads import count_usable_cores
    from ratchet.runs.run_dir import RunDirectory

    workers = workers or count_usable_cores()
    if RunDirectory(Path(file)).is_used:
        from ratchet.commands.score_run import score_run

        score_run(file, reward, keys or [], steps=step or [], as_json=json, workers=workers)
        return
    if not object_store.is_address(file) and (not Path(file).exists() or Path(file).is_dir()):
        fault = "a directory, but not a run directory" if Path(file).is_dir() else "not there"
        raise DataError(f"{file} is {fault}: name a file of answers, or the directory of a run")
    if step:
        raise ConfigError(f"--step is only for a run, and {file} is a file of answers: remove it")
    if not reward:
        raise ConfigError(
            "--reward is missing: give a kind (exact_match, math, code, ...) or the import path of "
            "your own"
        )
    score_file(
        file if object_store.is_address(file) else Path(file),
        reward,
        keys or [],
        as_json=json,
        workers=workers,
    )


app.command()(convert)
app.command()(push)
app.command()(replay)
app.command()(explain)
app.command()(new)


@app.command(name="import")
def import_config(
    file: Annotated[
        Path, typer.Argument(help="YAML or JSON; for verl also a shell script with overrides.")
    ],
    peer: Annotated[
        Literal["trl", "verl", "nemo-rl", "roll"] | None,
        typer.Option(
            "--from", help="The library that reads the file; default: detected from its keys."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="File for the recipe; default: the recipe is printed."),
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Also list the keys that have no effect on results.")
    ] = False,
) -> None:
    """Turn a configuration of TRL, verl, NeMo RL or ROLL into a recipe, and list keys without a
    counterpart."""
    from ratchet.commands.migrate.command import import_file

    import_file(file, peer, out, with_inert=everything)


app.command()(report)
app.command()(ui)
app.command()(watch)
app.command()(status)


@app.command()
def doctor(
    fix: Annotated[
        bool, typer.Option("--fix", help="Only print the commands that install what is missing.")
    ] = False,
) -> None:
    """Show what is installed, what is missing and how to get it, and what this machine offers."""
    from ratchet.commands.doctor import list_fixes, report

    if fix:
        say("\n".join(list_fixes()) or "nothing is missing")
    else:
        raise typer.Exit(report())


def main() -> None:
    """Run the command line.

    Errors meant for the user are printed without a traceback. Exit status 2 means that a recipe,
    data or a model is wrong, or too large for this machine.
    """
    prepare_streams()
    # OpenMP's threads (libgomp, which PyTorch brings) wait for each other by spinning, some 300,000
    # times before they sleep. On cores that other programs use, the thread that is waited for may
    # not run meanwhile: beside two busy programs on two cores, a step of a small model took 3 times
    # as long with two threads as with one. With 1,000 spins this slowdown is gone
    # (benchmarks/threads.py). libgomp reads GOMP_SPINCOUNT when torch is loaded, and worker
    # processes inherit it.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    # `kind: my_module:Mine` in a recipe may name a module in the current directory.
    sys.path.insert(0, str(Path.cwd()))
    try:
        failpoints.arm(os.environ.get("RATCHET_FAULTS", ""))
        credentials.set_environment(os.environ)
        object_store.configure_cache(os.environ)
        with fail_early_exits():
            app()
    except Exception as error:
        exit_with_error(error)  # raises an error again if it is a bug


if __name__ == "__main__":
    main()
