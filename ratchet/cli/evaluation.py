"""The command `ratchet eval`. It imports little, like `ratchet.cli.main`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ratchet.errors import ConfigError
from ratchet.utils.safe_read import parse_json

EvalTarget = Annotated[
    str,
    typer.Argument(
        help="A run, a checkpoint (RUN/checkpoints/step-...), a model directory, the address of an "
        "API (http://host/v1), the results directory of an earlier evaluation, or oracle (the "
        "demonstrations of the tasks)."
    ),
]
Tasks = Annotated[
    int | None, typer.Option(min=1, help="Number of held-out tasks; default: the recipe's.")
]
Samples = Annotated[
    int, typer.Option(min=0, help="Sampled attempts per task, beside the greedy one.")
]
PassThreshold = Annotated[
    float, typer.Option(help="Minimum reward of a sampled attempt that counts as passed.")
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
    float, typer.Option(min=0.01, help="For an API: time limit of a request, in seconds.")
]
ApiBody = Annotated[
    str,
    typer.Option(help="For an API: further keys of each request, as JSON; null removes a key."),
]


def evaluate(
    target: EvalTarget,
    keys: Annotated[
        list[str] | None,
        typer.Argument(
            help="Settings (key=value) for the environment given by --on, such as path=test.jsonl"
        ),
    ] = None,
    on: Annotated[
        str | None,
        typer.Option(
            help="An environment to evaluate on, such as gsm8k or my_pkg.maze:Maze; default: the "
            "recipe's."
        ),
    ] = None,
    recipe: Annotated[
        Path | None,
        typer.Option(help="Recipe with the environment to evaluate on; default: the run's recipe."),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="TARGET",
            help="Second target, evaluated in the same way and compared with the first, prompt by "
            "prompt.",
        ),
    ] = None,
    step: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Evaluate the run's checkpoint of this step; default: the run's trained model.",
        ),
    ] = None,
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
    out: Annotated[
        Path | None,
        typer.Option(
            help="Directory for the results; default: a new directory in the run's evals/, or in "
            "./evals/ if TARGET is no run."
        ),
    ] = None,
    model: ApiModel = None,
    api_key_env: ApiKeyEnv = None,
    concurrency: ApiConcurrency = 16,
    timeout_s: ApiTimeout = 600.0,
    body: ApiBody = "{}",
) -> None:
    """Evaluate a model on held-out tasks: greedy and sampled accuracy, pass@k, cons@k, and with
    --against whether it beats another model."""
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
