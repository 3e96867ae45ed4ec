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
        help="A run, a checkpoint (RUN/checkpoints/step-...) or model directory, the address "
        "of an API (http://host/v1), "
        "or results of an evaluation."
    ),
]
ApiModel = Annotated[str | None, typer.Option(help="Of an API: the model's name there.")]
ApiKeyEnv = Annotated[
    str | None, typer.Option(help="Of an API: environment variable that holds the key.")
]
ApiConcurrency = Annotated[int, typer.Option(min=1, help="Of an API: requests under way at once.")]
ApiTimeout = Annotated[float, typer.Option(min=0.01, help="Of an API: seconds for one answer.")]
ApiBody = Annotated[
    str, typer.Option(help="Of an API: further keys of a request, in JSON; null removes one.")
]


def evaluate(
    target: EvalTarget,
    keys: Annotated[list[str] | None, typer.Argument(help="Keys of --on: path=test.jsonl")] = None,
    on: Annotated[
        str | None,
        typer.Option(
            help="An environment to evaluate on, such as gsm8k or my_pkg.maze:Maze; default: the "
            "recipe's."
        ),
    ] = None,
    recipe: Annotated[
        Path | None, typer.Option(help="Whose environment to evaluate on; default: the run's own.")
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="TARGET",
            help="Another, evaluated alike: which of the two is better, prompt by prompt.",
        ),
    ] = None,
    step: Annotated[
        int | None,
        typer.Option(min=1, help="Of a checkpoint of the run; default: its trained model."),
    ] = None,
    tasks: Annotated[
        int | None, typer.Option(min=1, help="Held-out tasks; default: the recipe's.")
    ] = None,
    samples: Annotated[
        int, typer.Option(min=0, help="Sampled attempts a task, beside the greedy one.")
    ] = 4,
    greedy: Annotated[bool, typer.Option(help="One attempt a task at temperature 0.")] = True,
    pass_threshold: Annotated[
        float, typer.Option(help="Reward from which on a sampled attempt counts as passed.")
    ] = 1.0,
    temperature: Annotated[
        float | None, typer.Option(help="Of the sampled attempts; default: the recipe's.")
    ] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Of one answer; default: the recipe's, or 2048.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the sampled attempts.")] = 0,
    generator: Annotated[
        str | None, typer.Option(help="engine, vllm or hf; default: the run's own.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Where results go; default: evals/, numbered, of the run or here."),
    ] = None,
    model: ApiModel = None,
    api_key_env: ApiKeyEnv = None,
    concurrency: ApiConcurrency = 16,
    timeout_s: ApiTimeout = 600.0,
    body: ApiBody = "{}",
) -> None:
    """Evaluate a model on held-out tasks: greedy and sampled accuracy, pass@k, cons@k, and whether
    it beats another."""
    from ratchet.commands.eval import EndpointSettings, Evaluation, evaluate_target

    evaluation = Evaluation(
        recipe=recipe,
        on=on,
        words=keys or [],
        tasks=tasks,
        samples=samples,
        greedy=greedy,
        pass_threshold=pass_threshold,
        temperature=temperature,
        max_new_tokens=max_new_tokens,
        seed=seed,
        generator=generator,
        step=step,
        asked=EndpointSettings(model, api_key_env, concurrency, timeout_s, _object(body)),
    )
    evaluate_target(target, evaluation, against=against, out=out)


def _object(text: str) -> dict[str, Any]:
    try:
        body = parse_json(text)
    except ValueError as error:
        raise ConfigError(f"--body is no JSON: {error}") from None
    if not isinstance(body, dict):
        raise ConfigError(
            f'--body must be an object, such as {{"reasoning_effort": "low"}}, not {text:.80}'
        )
    return body
