"""Write a recipe for the user's own file and model (`ratchet new recipe --like`).

The file and the model are read, so that the recipe runs as it stands: what the columns hold, how
many rows are held out, how many tokens fit.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from typing import Any

import ratchet
from ratchet.commands.new import RecipeRequest
from ratchet.config.registry import KINDS
from ratchet.config.resolve import build, imported, resolve
from ratchet.config.yaml_tree import Budget, read_file, write_flow
from ratchet.data.chat.renderer import Renderer
from ratchet.data.chat.tokenizer import Tokenizer
from ratchet.data.chat.tokenizer_loading import load_tokenizer
from ratchet.data.tables import open_table
from ratchet.environments.datasets.dataset import Dataset
from ratchet.environments.datasets.usual_columns import list_candidates
from ratchet.errors import ConfigError, DataError
from ratchet.experience.sources.offline import TextRenderer
from ratchet.types import Message, Task
from ratchet.utils.object_store import is_address

# Names for a family of algorithms, beside the kinds themselves.
ALSO_CALLED = {"distillation": "distill_off_policy"}
# Shares of the rows to hold out, in the order in which they are tried: few rows need a larger one.
SHARES = (0.1, 0.2, 0.3, 0.5)
MIN_HELD_OUT = 2
MAX_HELD_OUT = 1000
# Above this many rows a tenth is never empty, so that the file is not read for it.
MANY_ROWS = 100_000
SAMPLE = 200  # rows that are rendered, to know how long they are
PASSES = 3
MIN_STEPS, MAX_STEPS = 20, 1000
# Peak learning rates by the model's size (upper bound in parameters): of given text, of preferences
# and scores, of rollouts. Small models from scratch take far larger ones than pretrained models.
RATES = (
    (1e7, {"rows": "2e-3", "rollouts": "3e-4", "": "5e-4"}),
    (1e9, {"rows": "5e-5", "rollouts": "2e-6", "": "5e-6"}),
    (float("inf"), {"rows": "1e-5", "rollouts": "1e-6", "": "1e-6"}),
)
LORA_FACTOR = 10  # an adapter takes a rate so much larger
MAX_ROW_TOKENS = 512  # of an answer, where the model's context would hold more


@dataclass(frozen=True)
class _Model:
    """The properties of a model directory.

    parameters, context: None if the directory is not here, or does not say.
    """

    tokenizer: Tokenizer | None = None
    parameters: float | None = None
    context: int | None = None

    @property
    def has_template(self) -> bool:
        return self.tokenizer is None or self.tokenizer.chat_template is not None


@dataclass(frozen=True)
class _Data:
    """The content of a data file. sizes: rows for training and held out."""

    description: str
    share: float
    sizes: tuple[int, int]
    longest_prompt: int = 0  # in tokens, of a sample


def write_recipe(name: str, request: RecipeRequest) -> str:
    """Return the text of the recipe.

    Raises:
        ConfigError: The algorithm is unknown, or needs a reward or a teacher.
        DataError: The file can't be used for it. The message names the row and the way out.
    """
    algorithm, lora = _find_algorithm(request)
    section = resolve("algorithm", algorithm)
    source = str(getattr(section, "source", "rows"))
    reads_reward = source == "rollouts" and bool(getattr(section, "reads_reward", True))
    if reads_reward and request.reward is None:
        raise ConfigError(
            f"algorithm {algorithm['kind']} learns from rewards: add --reward my_reward.py:f, a "
            "function (trajectory, task) -> float, or a built-in kind, --reward exact_match"
        )
    reward = None if request.reward is None else _name_reward(request.reward)
    model = _read_model(request.model)
    data = _read_data(request, source, model)
    lines = _lines(name, request, algorithm, lora, source, model, data, reward)
    width = max((len(line) for line, comment in lines if comment and len(line) < 60), default=0)
    return "".join(
        f"{line}  {' ' * max(0, width - len(line))}# {comment}\n" if comment else f"{line}\n"
        for line, comment in lines
    )


# --- the algorithm and the reward


def _find_algorithm(request: RecipeRequest) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Return the algorithm's section, and the adapter's if the recipe trains one."""
    name = ALSO_CALLED.get(request.like, request.like.removesuffix(".yaml"))
    if name in KINDS["algorithm"]:
        algorithm, lora = {"kind": name}, None
    else:
        algorithm, lora = _read_shipped(name)
    section_class = imported(KINDS["algorithm"][algorithm["kind"]])
    needs_teacher = "teacher" in algorithm or (
        "teacher" in section_class.model_fields
        and (section_class.model_fields["teacher"].is_required() or "distill" in name)
    )
    if needs_teacher and request.teacher is None:
        raise ConfigError(f"{name} learns from another model: add --teacher DIR")
    if request.teacher is not None and not needs_teacher:
        raise ConfigError(f"--teacher is not read by {name}: remove it")
    return (algorithm | {"teacher": request.teacher} if needs_teacher else algorithm), lora


def _read_shipped(name: str) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Return the sections of the last stage of a recipe in recipes/."""
    folder = Path(ratchet.__file__).parents[1] / "recipes"
    path = folder / f"{name}.yaml"
    if not re.fullmatch(r"[\w-]+", name) or not path.is_file():
        known = [*KINDS["algorithm"], *ALSO_CALLED, *(p.stem for p in folder.glob("*.yaml"))]
        near = get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(
            f"--like {name} is no algorithm and no shipped recipe: {hint}algorithms are "
            f"{', '.join(KINDS['algorithm'])}"
        )
    recipe = read_file(path, Budget())[0].plain()
    stage = {**recipe, **(recipe.get("stages") or [{}])[-1]}
    return dict(stage["algorithm"]), stage.get("lora")


def _name_reward(reward: str) -> str:
    """Return the kind of a reward. A file is named by its module, which the run must find.

    Raises ConfigError if it is none.
    """
    place, colon, function = reward.rpartition(":")
    if not colon:
        if reward not in KINDS["rewards"]:
            raise ConfigError(
                f"--reward {reward} is no built-in kind: use one of {', '.join(KINDS['rewards'])}, "
                "or a function of yours, my_reward.py:f"
            )
        return reward
    if place.endswith(".py"):
        path = Path(place)
        if not path.is_file():
            raise ConfigError(f"--reward {reward}: there is no file {place}")
        here, there = Path.cwd().resolve(), path.resolve()
        if not there.is_relative_to(here):
            raise ConfigError(
                f"--reward {reward}: the file must lie in this directory or below it, as a run "
                "imports it from there"
            )
        place = ".".join(there.relative_to(here).with_suffix("").parts)
    kind = f"{place}:{function}"
    target = imported(kind)
    if inspect.isfunction(target) and len(inspect.signature(target).parameters) < 2:
        raise ConfigError(
            f"--reward {reward} takes {inspect.signature(target)}, and a reward takes (trajectory, "
            "task)"
        )
    resolve("rewards", {"kind": kind})
    return kind


# --- the model


def _read_model(place: str) -> _Model:
    directory = Path(place)
    if is_address(place) or (not directory.exists() and re.fullmatch(r"[\w.-]+/[\w.-]+", place)):
        return _Model()  # at the hub or in a store: nothing is downloaded to write a recipe
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--model {place} is no Hugging Face directory: its config.json can't be read ({error})"
        ) from error
    config = config.get("text_config") or config
    context = config.get("max_position_embeddings") or config.get("n_positions")
    weights = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
    width = 4 if "32" in str(config.get("dtype") or config.get("torch_dtype")) else 2
    return _Model(
        load_tokenizer(directory),
        weights / width if weights else None,
        context if isinstance(context, int) else None,
    )


# --- the data


def _read_data(request: RecipeRequest, source: str, model: _Model) -> _Data:
    """Return what the file holds, once it is known that the algorithm can use it."""
    place = request.data
    if not is_address(place) and not Path(place).exists() and "*" not in place:
        raise DataError(f"--data {place}: there is no such file")
    table = open_table(place)
    description = _describe(table.row(0).values)
    if len(table) > MANY_ROWS:
        share = max(0.001, round(min(SHARES[0], MAX_HELD_OUT / len(table)), 3))
        held_out = round(share * len(table))
        dataset = _open(place, 0.0, scan=False)
        sizes = (len(table) - held_out, held_out)
    else:
        dataset, share, sizes = _hold_out(place)
    tasks = list(islice(dataset.tasks("train", seed=0), min(SAMPLE, sizes[0])))
    answers = [_list_answers(dataset, task, source) for task in tasks]
    if model.tokenizer is None:
        return _Data(description, share, sizes)
    renderer = Renderer(model.tokenizer, None if model.has_template else "turns")
    writer = TextRenderer(renderer, max_context=model.context or sys.maxsize)
    longest = 0
    for task, given in zip(tasks, answers, strict=True):
        for answer in given:
            writer.row(task, answer)  # raises an error of a row that the model can't hold
        if source == "rollouts":
            longest = max(longest, len(renderer.prompt(task.messages)))
    if model.context is not None and longest >= model.context:
        raise DataError(
            f"a prompt of {place} has {longest} tokens, but the model holds {model.context}: "
            "shorten or drop it"
        )
    return _Data(description, share, sizes, longest)


def _open(place: str, share: float, *, scan: bool = True) -> Dataset:
    values = {"kind": "dataset", "train": place, "test_share": share, "scan": scan}
    return build(resolve("environment", values))


def _hold_out(place: str) -> tuple[Dataset, float, tuple[int, int]]:
    """Return the data with the first share that leaves rows on both sides, and their numbers.

    The share is 0 if there are too few rows.
    """
    for share in SHARES:
        dataset = _open(place, share)
        train, test = len(dataset.rows("train")), len(dataset.rows("test"))
        if share == SHARES[0] and test > MAX_HELD_OUT:
            share = round(MAX_HELD_OUT / (train + test), 3)
            dataset = _open(place, share)
            train, test = len(dataset.rows("train")), len(dataset.rows("test"))
        if train >= MIN_HELD_OUT and test >= MIN_HELD_OUT:
            return dataset, share, (train, test)
    dataset = _open(place, 0.0)
    return dataset, 0.0, (len(dataset.rows("train")), 0)


def _list_answers(dataset: Dataset, task: Task, source: str) -> list[Sequence[Message]]:
    """Return the answers of a row that the algorithm learns from.

    Raises DataError if it can't learn from the row.
    """
    if source == "rows":
        return [dataset.demonstration(task)]
    if source == "pairs":
        pair = dataset.comparison(task)
        return [pair.chosen, pair.rejected]
    if source == "labelled":
        return [dataset.judged(task).messages]
    if source == "steps":
        dataset.steps(task)
    elif not task.messages:
        raise DataError(
            f"{task.where}: the row is plain text without a prompt to answer: use --like sft, or a "
            "file with prompts"
        )
    return []


def _describe(columns: Mapping[str, Any]) -> str:
    """Return what the columns of a row are taken for."""
    if "chosen" in columns:
        return "pairs: chosen is better than rejected"
    if list_candidates("messages", columns):
        return f"{list_candidates('messages', columns)[0]} are conversations"
    prompt = ", ".join(list_candidates("prompt", columns))
    if not prompt:
        return "text is plain text"
    answer = "solution" if "solution" in columns else ", ".join(list_candidates("answer", columns))
    return f"{prompt} is the prompt" + (f", {answer} the answer" if answer else "")


# --- the lines


def _lines(
    name: str,
    request: RecipeRequest,
    algorithm: Mapping[str, Any],
    lora: Mapping[str, Any] | None,
    source: str,
    model: _Model,
    data: _Data,
    reward: str | None,
) -> list[tuple[str, str]]:
    """Return the lines of the recipe, each with its comment."""
    train, test = data.sizes
    batch, steps = _choose_batch(train, source)
    every = max(1, steps // 4)
    rate, size = _choose_rate(model.parameters, source, adapter=lora is not None)
    optimizer = f"{{lr: {rate}, warmup_steps: {min(10, steps // 10)}, schedule: cosine}}"
    shown = " ".join(str(request.data).split())  # a line end in it would end the comment
    lines = [
        (f"# {algorithm['kind']} on {shown}, by `ratchet new recipe`. Change any line.", ""),
        (f"#   ratchet check {name}.yaml && ratchet train {name}.yaml", ""),
        (f"#   ratchet eval runs/{name}; ratchet report runs/{name}", ""),
        (f"name: {name}", "names the run's directory, runs/" + name),
        (f"model: {write_flow({'path': request.model})}", "a Hugging Face directory, or a hub id"),
    ]
    if not model.has_template:
        lines.append(("tokenizer: {kind: auto, template: turns}", "the model has no chat template"))
    lines += [
        ("environment:", ""),
        ("  kind: dataset", "rows of files; docs/data.md says what they may hold"),
        (f"  train: {write_flow(request.data)}", f"{train + test:,} rows; {data.description}"),
        (f"  test_share: {data.share:g}", f"share held out for evaluation: {test:,} rows"),
        (f"algorithm: {write_flow(algorithm)}", f"`ratchet explain-algorithm {algorithm['kind']}`"),
    ]
    if reward is not None:
        lines.append((f"rewards: [{write_flow({'kind': reward})}]", "judges each answer"))
    if lora is not None:
        lines.append((f"lora: {write_flow(lora)}", "trains an adapter in place of the weights"))
    if source == "rollouts" or reward is not None:
        room = (model.context or 2 * MAX_ROW_TOKENS) - data.longest_prompt
        tokens = max(1, min(MAX_ROW_TOKENS, model.context // 2 if model.context else room, room))
        lines.append((f"sampling: {{max_new_tokens: {tokens}}}", "longest answer, in tokens"))
    passes = steps * batch / max(1, train)
    unit = "prompts" if source == "rollouts" else "pairs" if source == "pairs" else "rows"
    lines += [
        (f"steps: {steps}", f"batches: {passes:.2g} passes over {train:,} {unit}"),
        (f"batch_size: {batch}", f"{unit} a step"),
        (f"optimizer: {optimizer}", f"the peak rate is one for {size}"),
    ]
    if test:
        tasks = min(test, 128 if source == "rollouts" or reward is not None else 512)
        lines.append((f"evaluation: {{every: {every}, tasks: {tasks}}}", "also before and after"))
    else:
        lines.append(("evaluation: {tasks: 0}", "so few rows that none is held out"))
    lines.append((f"checkpoint: {{every: {every}}}", "steps between checkpoints"))
    return lines


def _choose_batch(rows: int, source: str) -> tuple[int, int]:
    """Return rows a step and the number of steps, for few rows and for many."""
    most = 16 if source == "rollouts" else 32
    least = 2 if rows > 1 else 1  # KTO compares answers to different prompts
    batch = max(least, min(most, rows // 4))
    return batch, max(MIN_STEPS, min(MAX_STEPS, round(PASSES * rows / batch)))


def _choose_rate(parameters: float | None, source: str, *, adapter: bool) -> tuple[str, str]:
    """Return the peak learning rate, and the size of model that it is for, in words."""
    number = float("inf") if parameters is None else parameters
    rates = next(rates for bound, rates in RATES if number <= bound)
    rate = rates.get(source, rates[""])
    if adapter:
        rate = f"{LORA_FACTOR * float(rate):.0e}".replace("e-0", "e-")
    if parameters is None:
        return rate, "a pretrained model of a billion parameters"
    return rate, f"a model of {_short(parameters)} parameters"


def _short(number: float) -> str:
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.0f}"
