"""The command `ratchet eval`. It imports little, like `ratchet.cli.main`."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any

import typer

from ratchet.cli.completion import complete_run
from ratchet.cli.errors import require_finite
from ratchet.errors import ConfigError
from ratchet.utils.safe_read import parse_json

EvalTarget = Annotated[
    str,
    typer.Argument(
        help="A run, a checkpoint (RUN/checkpoints/step-...), a model directory, the address of an "
        "API (http://host/v1), the results directory of an earlier evaluation, or oracle (the "
        "demonstrations of the tasks).",
        autocompletion=complete_run,
    ),
]
Tasks = Annotated[
    int | None, typer.Option(min=1, help="Number of held-out tasks; default: the recipe's.")
]
Samples = Annotated[
    int, typer.Option(min=0, help="Sampled attempts per task, beside the greedy one.")
]
PassThreshold = Annotated[
    float,
    typer.Option(
        callback=require_finite, help="Minimum reward of a sampled attempt that counts as passed."
    ),
]
Temperature = Annotated[
    float | None, typer.Option(help="Temperature of the sampled attempts; default: the recipe's.")
]
MaxNewTokens = Annotated[
    int | None,
    typer.Option(min=1, help="Maximum tokens of an answer; default: the recipe's, or 2048."),
]
ApiModel = Annotated[
    str | None, typer.Option(help="For an API, where it is required: the model's name.")
]
ApiKeyEnv = Annotated[
    str | None,
    typer.Option(help="For an API: environment variable that holds the API key; default: no key."),
]
ApiConcurrency = Annotated[int, typer.Option(min=1, help="For an API: concurrent requests.")]
ApiTimeout = Annotated[
    float,
    typer.Option(
        min=0.01,
        callback=require_finite,
        help="For an API: time limit of a request, in seconds.",
    ),
]
ApiBody = Annotated[
    str,
    typer.Option(help="For an API: further keys of each request, as JSON; null removes a key."),
]
TasksKind = Annotated[
    str | None,
    typer.Option(
        help="An environment to evaluate on, such as gsm8k or my_pkg.maze:Maze; default: the "
        "recipe's."
    ),
]
TasksRecipe = Annotated[
    str | None,
    typer.Option(help="Recipe with the environment to evaluate on; default: the run's recipe."),
]
Against = Annotated[
    str | None,
    typer.Option(
        metavar="TARGET",
        help="Second target, evaluated in the same way and compared with the first, prompt by "
        "prompt.",
    ),
]
InspectTask = Annotated[
    str | None,
    typer.Option(
        metavar="TASK",
        help="Evaluate with inspect-ai, on this task: sums.py, sums.py@name, or a registered name.",
    ),
]
LmEvalTask = Annotated[
    str | None,
    typer.Option(
        metavar="TASK",
        help="Evaluate by lm-evaluation-harness on this task of its: a name, a group or a YAML "
        "file; several with commas. Keys are its options, such as num_fewshot=5.",
    ),
]
Step = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Evaluate the run's checkpoint of this step; default: the run's trained model.",
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(
        help="Directory for the results; default: a new directory in the run's evals/, or in "
        "./evals/ if TARGET is not a run."
    ),
]

# Options that have an effect beside --inspect or --lm-eval. The task sets everything else.
PROGRAM_OPTIONS = ("target", "step", "tasks", "generator", "out")
INSPECT_OPTIONS = (*PROGRAM_OPTIONS, "inspect", "temperature", "max_new_tokens")
LM_EVAL_OPTIONS = (*PROGRAM_OPTIONS, "lm_eval", "keys")


def evaluate(
    context: typer.Context,
    target: EvalTarget,
    keys: Annotated[
        list[str] | None,
        typer.Argument(
            help="Settings (key=value) for the environment given by --on, such as path=test.jsonl"
        ),
    ] = None,
    on: TasksKind = None,
    recipe: TasksRecipe = None,
    against: Against = None,
    step: Step = None,
    inspect: InspectTask = None,
    lm_eval: LmEvalTask = None,
    tasks: Tasks = None,
    samples: Samples = 4,
    greedy: Annotated[
        bool, typer.Option(help="Also make one attempt per task at temperature 0.")
    ] = True,
    pass_threshold: PassThreshold = 1.0,
    temperature: Temperature = None,
    max_new_tokens: MaxNewTokens = None,
    seed: Annotated[int, typer.Option(help="Seed of the sampled attempts.")] = 0,
    generator: Annotated[
        str | None, typer.Option(help="engine, vllm or hf; default: the run's kind.")
    ] = None,
    out: Out = None,
    model: ApiModel = None,
    api_key_env: ApiKeyEnv = None,
    concurrency: ApiConcurrency = 16,
    timeout_s: ApiTimeout = 600.0,
    body: ApiBody = "{}",
) -> None:
    """Evaluate a model on held-out tasks: greedy and sampled accuracy, pass@k, cons@k, and with
    --against whether it beats another model."""
    if inspect is not None:
        _refuse_other_options(context, "--inspect", INSPECT_OPTIONS)
        from ratchet.commands.eval_inspect import InspectSettings, evaluate_by_inspect

        settings = InspectSettings(inspect, step, tasks, temperature, max_new_tokens, generator)
        evaluate_by_inspect(target, settings, out=out)
        return
    if lm_eval is not None:
        _refuse_other_options(context, "--lm-eval", LM_EVAL_OPTIONS)
        from ratchet.commands.eval_lm_harness import HarnessSettings, evaluate_by_harness

        harness = HarnessSettings(lm_eval, keys or [], step, tasks, generator)
        evaluate_by_harness(target, harness, out=out)
        return
    from ratchet.commands.eval import evaluate_target
    from ratchet.commands.eval_setup import EndpointSettings, EvaluationSettings

    evaluation = EvaluationSettings(
        recipe=recipe,
        on=on,
        overrides=keys or [],
        tasks=tasks,
        samples=samples,
        greedy=greedy,
        pass_threshold=pass_threshold,
        temperature=temperature,
        max_new_tokens=max_new_tokens,
        seed=seed,
        generator=generator,
        step=step,
        endpoint=EndpointSettings(model, api_key_env, concurrency, timeout_s, _parse_body(body)),
    )
    evaluate_target(target, evaluation, against=against, out=out)


def _refuse_other_options(context: typer.Context, program: str, allowed: Collection[str]) -> None:
    """Raise ConfigError for an option that has no effect beside --inspect or --lm-eval."""
    value: Any
    for name, value in context.params.items():
        source = context.get_parameter_source(name)
        is_given = source is not None and source.name == "COMMANDLINE"
        if is_given and value not in (None, []) and name not in allowed:
            option = str(value[0]) if name == "keys" else f"--{name.replace('_', '-')}"
            raise ConfigError(
                f"{option} has no effect beside {program}, whose task sets that: remove {option}"
            )


def _parse_body(text: str) -> dict[str, Any]:
    try:
        body = parse_json(text)
    except ValueError as error:
        raise ConfigError(f"--body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise ConfigError(
            f'--body must be an object, such as {{"reasoning_effort": "low"}}, not {text:.80}'
        )
    return body
