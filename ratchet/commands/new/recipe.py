"""Write a recipe for the user's own file and model (`ratchet new recipe --like`).

The recipe runs without changes, because the file and the model are read first: the columns, the
number of rows and the length of the model's context determine its keys.
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

from ratchet.commands.new.command import RecipeRequest
from ratchet.config.peer_names import find_reward_kind
from ratchet.config.registry import KINDS
from ratchet.config.resolve import build, import_object, resolve
from ratchet.config.yaml_tree import Budget, read_file, write_flow
from ratchet.data.chat.renderer import Renderer
from ratchet.data.chat.tokenizer import Tokenizer
from ratchet.data.chat.tokenizer_loading import load_tokenizer
from ratchet.data.tables import open_table
from ratchet.environments.datasets.dataset import Dataset
from ratchet.environments.datasets.usual_columns import find_reference, list_candidates
from ratchet.errors import ConfigError, DataError, RowTooLong
from ratchet.experience.sources.offline import TextRenderer
from ratchet.recipes import list_recipes
from ratchet.runs.run_dir import MODEL
from ratchet.training.saved_weights import find_saved
from ratchet.types import Message, Task
from ratchet.utils.object_store import is_address

# Other names of algorithms, and the kinds that they stand for.
ALGORITHM_ALIASES = {"distillation": "distill_off_policy"}
# Shares of the rows to hold out, in the order in which they are tried. A small file needs a large
# share.
HELD_OUT_SHARES = (0.1, 0.2, 0.3, 0.5)
MIN_SPLIT_ROWS = 2
MAX_HELD_OUT_ROWS = 1000
# A longer file is not scanned to count its held-out rows, because a tenth of it is never empty.
MAX_SCANNED_ROWS = 100_000
N_SAMPLED_ROWS = 200  # rows that are rendered to measure their lengths
N_PASSES = 3  # passes over the training rows
MIN_STEPS, MAX_STEPS = 20, 1000
# Peak learning rates by the model's size (upper bound in parameters) and by the algorithm's source
# ("" stands for preferences, labels and step labels). Small models from scratch take far larger
# rates than pretrained models.
PEAK_LEARNING_RATES = (
    (1e7, {"rows": "2e-3", "rollouts": "3e-4", "": "5e-4"}),
    (1e9, {"rows": "5e-5", "rollouts": "2e-6", "": "5e-6"}),
    (float("inf"), {"rows": "1e-5", "rollouts": "1e-6", "": "1e-6"}),
)
LORA_RATE_FACTOR = 10  # the rate for an adapter is the rate for all weights times this
MAX_ANSWER_TOKENS = 512  # limit of an answer, even if the model's context is longer


@dataclass(frozen=True)
class _Model:
    """The properties of a model. All are None if the model is not in a local directory."""

    tokenizer: Tokenizer | None = None
    n_parameters: float | None = None
    """The number of parameters; also None without safetensors files."""
    max_context: int | None = None
    """The maximum number of tokens; also None if config.json does not give it."""

    @property
    def has_template(self) -> bool:
        """True if the tokenizer has a chat template, or is unknown and so assumed to have one."""
        return self.tokenizer is None or self.tokenizer.chat_template is not None


@dataclass(frozen=True)
class _Data:
    """The content of a data file."""

    description: str
    held_out_share: float
    split_sizes: tuple[int, int]  # (training rows, held-out rows)
    # Tokens of the longest prompt in a sample of rows; 0 unless the algorithm samples rollouts.
    max_prompt_tokens: int = 0
    too_long: str = ""  # how many rows of the sample the model does not hold; "" for none


def write_recipe(name: str, request: RecipeRequest) -> str:
    """Return the text of the recipe.

    Raises:
        ConfigError: The algorithm is unknown, or needs a reward or a teacher.
        DataError: The algorithm can't train on the file. The message names the row and a fix.
    """
    algorithm, lora = _find_algorithm(request)
    section = resolve("algorithm", algorithm)
    source = str(section.source or "rows")
    reads_reward = source == "rollouts" and section.reads_reward
    if reads_reward and request.reward is None:
        raise ConfigError(
            f"algorithm {algorithm['kind']} learns from rewards: add --reward my_reward.py:f, a "
            "function (trajectory, task) -> float or one written for TRL, verl or OpenRLHF, or a "
            "built-in kind, --reward exact_match"
        )
    reward = None if request.reward is None else _make_reward(request.reward)
    model = _read_model(request.model)
    data = _read_data(request, source, model)
    lines = _make_lines(name, request, algorithm, lora, source, model, data, reward)
    width = max((len(line) for line, comment in lines if comment and len(line) < 60), default=0)
    return "".join(
        f"{line}  {' ' * max(0, width - len(line))}# {comment}\n" if comment else f"{line}\n"
        for line, comment in lines
    )


# --- the algorithm and the reward


def _find_algorithm(request: RecipeRequest) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Return the `algorithm` section, and the `lora` section or None without an adapter."""
    name = ALGORITHM_ALIASES.get(request.like, request.like.removesuffix(".yaml"))
    if name in KINDS["algorithm"]:
        algorithm, lora = {"kind": name}, None
    else:
        algorithm, lora = _read_shipped_recipe(name)
    section_class = import_object(KINDS["algorithm"][algorithm["kind"]])
    needs_teacher = "teacher" in algorithm or (
        "teacher" in section_class.model_fields
        and (section_class.model_fields["teacher"].is_required() or "distill" in name)
    )
    if needs_teacher and request.teacher is None:
        raise ConfigError(f"{name} learns from another model: add --teacher DIR")
    if request.teacher is not None and not needs_teacher:
        raise ConfigError(f"--teacher is not read by {name}: remove it")
    return (algorithm | {"teacher": request.teacher} if needs_teacher else algorithm), lora


def _read_shipped_recipe(name: str) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Return the `algorithm` and `lora` sections of the last stage of a recipe of Ratchet."""
    recipes = list_recipes()
    if name not in recipes:
        known_names = [*KINDS["algorithm"], *ALGORITHM_ALIASES, *recipes]
        close_names = get_close_matches(name, known_names, n=1)
        hint = f"did you mean {close_names[0]}? " if close_names else ""
        raise ConfigError(
            f"--like {name} is neither an algorithm nor a shipped recipe: {hint}algorithms are "
            f"{', '.join(KINDS['algorithm'])}"
        )
    recipe = read_file(recipes[name], Budget())[0].plain()
    stage = {**recipe, **(recipe.get("stages") or [{}])[-1]}
    return dict(stage["algorithm"]), stage.get("lora")


def _make_reward(reward: str) -> dict[str, str]:
    """Return the keys of a reward. For a file, they name the module that the run imports.

    Raises ConfigError if `reward` is not a reward.
    """
    module, colon, function = reward.rpartition(":")
    if not colon:
        if reward not in KINDS["rewards"]:
            raise ConfigError(
                f"--reward {reward} is not a built-in kind: use one of "
                f"{', '.join(KINDS['rewards'])}, or a function of yours, my_reward.py:f"
            )
        return {"kind": reward}
    if module.endswith(".py"):
        path = Path(module)
        if not path.is_file():
            raise ConfigError(f"--reward {reward}: there is no file {module}")
        working_dir, resolved_path = Path.cwd().resolve(), path.resolve()
        if not resolved_path.is_relative_to(working_dir):
            raise ConfigError(
                f"--reward {reward}: the file must lie in this directory or below it, as a run "
                "imports it from there"
            )
        module = ".".join(resolved_path.relative_to(working_dir).with_suffix("").parts)
    kind = f"{module}:{function}"
    target = import_object(kind)
    if inspect.isfunction(target) and (library := find_reward_kind(target)):
        return {"kind": library, "function": kind}
    if inspect.isfunction(target) and len(inspect.signature(target).parameters) < 2:
        raise ConfigError(
            f"--reward {reward} takes {inspect.signature(target)}, and a reward takes (trajectory, "
            "task)"
        )
    resolve("rewards", {"kind": kind})
    return {"kind": kind}


# --- the model


def _read_model(model: str) -> _Model:
    """Read the properties of a local model directory. Raises ConfigError if it is not a model."""
    saved = None if is_address(model) else find_saved(model)
    directory = Path(model) if saved is None else saved.run / MODEL
    if saved is not None and not directory.is_dir():
        return _Model()  # a checkpoint of a run that has not ended
    if is_address(model) or (not directory.exists() and re.fullmatch(r"[\w.-]+/[\w.-]+", model)):
        return _Model()  # at the hub or in a store: nothing is downloaded to write a recipe
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--model {model} is no Hugging Face directory: its config.json can't be read ({error})"
        ) from error
    config = config.get("text_config") or config
    max_context = config.get("max_position_embeddings") or config.get("n_positions")
    weight_bytes = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
    bytes_per_weight = 4 if "32" in str(config.get("dtype") or config.get("torch_dtype")) else 2
    return _Model(
        load_tokenizer(directory),
        weight_bytes / bytes_per_weight if weight_bytes else None,
        max_context if isinstance(max_context, int) else None,
    )


# --- the data


def _read_data(request: RecipeRequest, source: str, model: _Model) -> _Data:
    """Return the content of the data file.

    Raises DataError if the algorithm can't train on it, or if the model holds none of its rows.
    """
    data_path = request.data
    if not is_address(data_path) and not Path(data_path).exists() and "*" not in data_path:
        raise DataError(f"--data {data_path}: there is no such file")
    table = open_table(data_path)
    description = _describe_columns(table.row(0).values)
    if len(table) > MAX_SCANNED_ROWS:
        held_out_share = max(
            0.001, round(min(HELD_OUT_SHARES[0], MAX_HELD_OUT_ROWS / len(table)), 3)
        )
        n_held_out = round(held_out_share * len(table))
        dataset = _open_dataset(data_path, 0.0, scan=False)
        split_sizes = (len(table) - n_held_out, n_held_out)
    else:
        dataset, held_out_share, split_sizes = _hold_out(data_path)
    tasks = list(islice(dataset.tasks("train", seed=0), min(N_SAMPLED_ROWS, split_sizes[0])))
    answers_by_task = [_list_answers(dataset, task, source) for task in tasks]
    if model.tokenizer is None:
        return _Data(description, held_out_share, split_sizes)
    renderer = Renderer(model.tokenizer, None if model.has_template else "turns")
    text_renderer = TextRenderer(renderer, max_context=model.max_context or sys.maxsize)
    max_prompt_tokens, n_too_long = 0, 0
    for task, row_answers in zip(tasks, answers_by_task, strict=True):
        try:
            for answer in row_answers:
                text_renderer.row(task, answer)
            if source == "rollouts":
                n_tokens = _count_prompt_tokens(task, renderer, text_renderer.max_context)
                max_prompt_tokens = max(max_prompt_tokens, n_tokens)
        except RowTooLong:
            n_too_long += 1
            if n_too_long == len(tasks):
                raise
    too_long = (
        f"{n_too_long} of the first {len(tasks)} rows have more tokens than the model's "
        f"{model.max_context}"
        if n_too_long
        else ""
    )
    return _Data(description, held_out_share, split_sizes, max_prompt_tokens, too_long)


def _count_prompt_tokens(task: Task, renderer: Renderer, max_context: int) -> int:
    """Return the number of a prompt's tokens. Raises RowTooLong if no token of an answer fits."""
    n_tokens = len(renderer.prompt(task.messages))
    if n_tokens >= max_context:
        raise RowTooLong(
            f"{task.where}: a prompt of {n_tokens} tokens, but the model holds {max_context}: "
            "shorten or drop it"
        )
    return n_tokens


def _open_dataset(data_path: str, share: float, *, scan: bool = True) -> Dataset:
    settings = {"kind": "dataset", "train": data_path, "test_share": share, "scan": scan}
    return build(resolve("environment", settings))


def _hold_out(data_path: str) -> tuple[Dataset, float, tuple[int, int]]:
    """Return the dataset, its held-out share, and its numbers of training and held-out rows.

    The share is the first of HELD_OUT_SHARES that leaves MIN_SPLIT_ROWS rows in both splits, or 0
    if there are too few rows.
    """
    for share in HELD_OUT_SHARES:
        dataset = _open_dataset(data_path, share)
        n_train = len(dataset.rows("train"))
        n_test = len(dataset.rows("test"))
        if share == HELD_OUT_SHARES[0] and n_test > MAX_HELD_OUT_ROWS:
            share = round(MAX_HELD_OUT_ROWS / (n_train + n_test), 3)
            dataset = _open_dataset(data_path, share)
            n_train = len(dataset.rows("train"))
            n_test = len(dataset.rows("test"))
        if n_train >= MIN_SPLIT_ROWS and n_test >= MIN_SPLIT_ROWS:
            return dataset, share, (n_train, n_test)
    dataset = _open_dataset(data_path, 0.0)
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
        return [dataset.labelled_answer(task).messages]
    if source == "steps":
        dataset.steps(task)
    elif not task.messages:
        raise DataError(
            f"{task.where}: the row is plain text without a prompt to answer: use --like sft, or a "
            "file with prompts"
        )
    return []


def _describe_columns(columns: Mapping[str, Any]) -> str:
    """Return a description of how the columns of a row are used."""
    if "chosen" in columns:
        return "pairs: chosen is better than rejected"
    if list_candidates("messages", columns):
        return f"{list_candidates('messages', columns)[0]} are conversations"
    prompt = ", ".join(list_candidates("prompt", columns))
    if not prompt:
        return "text is plain text"
    usual = next((name for name in ("answer", "solution") if name in columns), "")
    reference = "" if usual == "answer" else find_reference(columns)[0]
    answer = reference or usual or ", ".join(list_candidates("answer", columns))
    if answer:
        return f"{prompt} is the prompt, {answer} the answer"
    return f"{prompt} is the prompt" + ("" if "completions" in columns else ", without an answer")


# --- the lines


def _make_lines(
    name: str,
    request: RecipeRequest,
    algorithm: Mapping[str, Any],
    lora: Mapping[str, Any] | None,
    source: str,
    model: _Model,
    data: _Data,
    reward: dict[str, str] | None,
) -> list[tuple[str, str]]:
    """Return the lines of the recipe, each with its comment."""
    n_train, n_test = data.split_sizes
    batch_size, n_steps = _choose_batch(n_train, source)
    interval = max(1, n_steps // 4)
    peak_rate, model_size = _choose_rate(model.n_parameters, source, with_adapter=lora is not None)
    optimizer = f"{{lr: {peak_rate}, warmup_steps: {min(10, n_steps // 10)}, schedule: cosine}}"
    # A line end in the name would end the comment.
    data_name = " ".join(str(request.data).split())
    lines = [
        (f"# {algorithm['kind']} on {data_name}, by `ratchet new recipe`. Change any line.", ""),
        (f"#   ratchet check {name}.yaml && ratchet train {name}.yaml", ""),
        (f"#   ratchet eval runs/{name}; ratchet report runs/{name}", ""),
        (f"name: {name}", "names the run's directory, runs/" + name),
        (
            f"model: {write_flow({'path': request.model})}",
            "a Hugging Face directory, a hub id, or a run",
        ),
    ]
    if not model.has_template:
        lines.append(("tokenizer: {kind: auto, template: turns}", "the model has no chat template"))
    lines += [
        ("environment:", ""),
        ("  kind: dataset", "rows of files; docs/data.md says what they may hold"),
        (f"  train: {write_flow(request.data)}", f"{n_train + n_test:,} rows; {data.description}"),
        (
            f"  test_share: {data.held_out_share:g}",
            f"share held out for evaluation: {n_test:,} rows",
        ),
        *([("  too_long: drop", data.too_long)] if data.too_long else []),
        (f"algorithm: {write_flow(algorithm)}", f"`ratchet explain-algorithm {algorithm['kind']}`"),
    ]
    if reward is not None:
        lines.append((f"rewards: [{write_flow(reward)}]", "judges each answer"))
    if lora is not None:
        lines.append((f"lora: {write_flow(lora)}", "trains an adapter in place of the weights"))
    if source == "rollouts" or reward is not None:
        free_context = (model.max_context or 2 * MAX_ANSWER_TOKENS) - data.max_prompt_tokens
        half_context = model.max_context // 2 if model.max_context else free_context
        max_new_tokens = max(1, min(MAX_ANSWER_TOKENS, half_context, free_context))
        lines.append(
            (f"sampling: {{max_new_tokens: {max_new_tokens}}}", "longest answer, in tokens")
        )
    n_passes = n_steps * batch_size / max(1, n_train)
    unit = "prompts" if source == "rollouts" else "pairs" if source == "pairs" else "rows"
    lines += [
        (f"steps: {n_steps}", f"batches: {n_passes:.2g} passes over {n_train:,} {unit}"),
        (f"batch_size: {batch_size}", f"{unit} a step"),
        (f"optimizer: {optimizer}", f"lr is usual for {model_size}"),
    ]
    if n_test:
        n_tasks = min(n_test, 128 if source == "rollouts" or reward is not None else 512)
        lines.append(
            (f"evaluation: {{every: {interval}, tasks: {n_tasks}}}", "also before and after")
        )
    else:
        lines.append(("evaluation: {tasks: 0}", "so few rows that none is held out"))
    lines.append((f"checkpoint: {{every: {interval}}}", "steps between checkpoints"))
    return lines


def _choose_batch(n_rows: int, source: str) -> tuple[int, int]:
    """Return the batch size and the number of steps for `n_rows` training rows."""
    max_size = 16 if source == "rollouts" else 32
    min_size = 2 if n_rows > 1 else 1  # KTO compares answers to different prompts
    batch_size = max(min_size, min(max_size, n_rows // 4))
    return batch_size, max(MIN_STEPS, min(MAX_STEPS, round(N_PASSES * n_rows / batch_size)))


def _choose_rate(n_parameters: float | None, source: str, *, with_adapter: bool) -> tuple[str, str]:
    """Return the peak learning rate, and in words the model size for which it is usual."""
    size = float("inf") if n_parameters is None else n_parameters
    rates = next(rates for bound, rates in PEAK_LEARNING_RATES if size <= bound)
    rate = rates.get(source, rates[""])
    if with_adapter:
        rate = f"{LORA_RATE_FACTOR * float(rate):.0e}".replace("e-0", "e-")
    if n_parameters is None:
        return rate, "a pretrained model of a billion parameters"
    return rate, f"a model of {_format_count(n_parameters)} parameters"


def _format_count(count: float) -> str:
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f}"
