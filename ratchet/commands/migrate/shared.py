"""Conversions and notes that the tables of several peers share."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from ratchet.commands.migrate import numbers
from ratchet.commands.migrate.table import Dropped, PeerConfig, Values
from ratchet.data.presets.datasets import PRESETS, Preset

# Notes on keys, shown to users. "there" means the peer, "here" means Ratchet.
PRECISION = (
    "weights train in float32, and matrix products on an accelerator are in bfloat16; "
    "learner.kind=megatron has weights: bfloat16"
)
PACKING = "sequences are always packed without padding: there is nothing to set"
MICRO_BATCHES = (
    "the size of a micro-batch is in tokens here (learner.micro_batch_tokens, auto by default); "
    "it changes memory and speed, never the result"
)
BASE_CONFIG = (
    "the config file of the command is not read: import that file, and set these keys over it"
)
# The note on the weight decay of the optimizer.
WEIGHT_DECAY = "only matrices decay here"
KV_CACHE = "the size of vLLM's KV cache is set in GiB here (generator.kv_cache_gib), not as a share"
OVERRIDDEN = "{key} overrides this key"
# A maximum number of steps from this size on means that the number of passes ends training.
UNLIMITED_STEPS = 100_000
NUMERICS = "there is no switch here: the learner chooses its numerics"
DATA_LOADER = "rows are a function of seed and position here: there is no data loader to configure"
USER_REWARD = (
    "a reward function of yours takes (trajectory, task) here and returns a number or named "
    "parts: create one with `ratchet new reward NAME`, then set rewards: [{kind: NAME:NAME}]"
)
KEPT_FUNCTION = "the function runs unchanged (docs/integrations), from the directory that it names"
COLUMNS = (
    "the columns are prompt and answer here, or those in environment.columns: see "
    "`ratchet data inspect`"
)
PAIR_COLUMNS = (
    "the columns are prompt, chosen and rejected here, or those in environment.columns: see "
    "`ratchet data inspect`"
)
FILE_PATTERN = re.compile(r"\.(parquet|jsonl?|csv|arrow)$|^[~/.]|://")
TRACKERS = ("wandb", "mlflow", "swanlab", "trackio")
KL_FORWARD = (
    "the gradient of k3 there is that of KL(reference || policy), which is objective forward here; "
    "for KL(policy || reference) set objective: reverse"
)


def warmup_share(
    value: Any, steps: int | None, round_steps: Callable[[float], int], *, factor: int = 1
) -> Values:
    """Convert a share of all the peer's steps to a warm-up.

    The warm-up stays a share if the file doesn't give the number of all steps.

    Args:
        value: The share.
        steps: The number of all steps, as the peer counts them; None: unknown.
        round_steps: A function that rounds as the peer does.
        factor: Number of optimizer steps in one of the peer's steps.
    """
    fraction = numbers.number(value)
    if fraction and steps is None:
        return Values({"optimizer.warmup_share": fraction})
    return Values({"optimizer.warmup_steps": round_steps(fraction * (steps or 0)) * factor})


def passes(value: Any) -> int | float:
    """Convert a number of passes over the data, which must be above 0."""
    count = numbers.number(value)
    if count <= 0:
        raise numbers.InvalidValue(f"is {count}, and not above 0: set passes or steps by hand")
    return count


def betas(first: str, second: str) -> Any:
    """Return the conversion of a peer's two keys to `optimizer.betas`."""
    return lambda value, config: [config.number(first), config.number(second)]


def as_text(value: Any, config: PeerConfig) -> Any:
    return str(value)


def make_user_reward(kind: str, path: str, **keys: Any) -> dict[str, Any]:
    """Return the reward of a user's function.

    Args:
        kind: The reward's kind, which names the library that the function was written for.
        path: "module.name", "module:name" or "file.py:name".
        keys: Further keys of the reward's section.
    """
    module, _, name = path.rpartition(":" if ":" in path else ".")
    return {"kind": kind, "function": f"{module}:{name}", **keys}


def collect_keys(prefix: str) -> Callable[[Any, PeerConfig], Any]:
    """Return a conversion to one mapping of all keys below a prefix, with their values."""

    def convert(value: Any, config: PeerConfig) -> Any:
        names = [key for key in config.values if key.startswith(prefix)]
        return {name.removeprefix(prefix): config[name] for name in names}

    return convert


def template(value: Any, config: PeerConfig) -> Any:
    if str(value).endswith(".jinja"):
        return value
    return Dropped("write its text to a .jinja file, and set tokenizer.template to the file's path")


def clip_norm(value: Any, config: PeerConfig) -> Any:
    """Convert a maximum gradient norm. The peer turns clipping off with 0, Ratchet with null."""
    return numbers.number(value) or None


def run_name(value: Any, config: PeerConfig) -> str:
    """Convert a run's name to a valid directory name."""
    return re.sub(r"[^\w.+-]+", "-", str(value)).lstrip("_.+-") or "run"


def sinks(value: Any, project: Any) -> Any:
    """Convert the names of trackers to keys of `logging`."""
    names = [value] if isinstance(value, str) else list(value or ())
    trackers = [
        {"kind": name, **({"project": str(project)} if project and name != "mlflow" else {})}
        for name in names
        if name in TRACKERS
    ]
    has_tensorboard = "tensorboard" in names or not names or names == ["none"]
    tensorboard = {"logging.tensorboard": "tensorboard" in names} if has_tensorboard else {}
    values: dict[str, Any] = {**tensorboard, **({"logging.sinks": trackers} if trackers else {})}
    others = [
        name
        for name in names
        if name not in (*TRACKERS, "tensorboard", "none", "console", "stdout")
    ]
    if not values:
        return Dropped(
            "metrics always go to metrics.jsonl and the terminal"
            + (f"; there is no sink for {', '.join(others)} here" if others else "")
        )
    return Values(
        values, f"there is no sink for {', '.join(others)} (logging.sinks)" if others else ""
    )


def training_data(value: Any, config: PeerConfig) -> Values:
    """Convert the names of data: files, a published dataset, or an id on the hub."""
    names = [str(name) for name in (value if isinstance(value, list) else [value])]
    if all(FILE_PATTERN.search(name) for name in names):
        return Values({"environment.train": names})
    others = (
        f"only the first dataset is used: for {', '.join(names[1:])} set environment.kind=mixture"
        if len(names) > 1
        else ""
    )
    dataset = find_preset_name(names[0])
    note = "the preset maps the dataset's columns (docs/data.md)" if dataset else ""
    return Values(
        {"environment.preset": dataset} if dataset else {"environment.hub": names[0]},
        "; ".join(filter(None, [note, others])),
    )


def find_preset_name(name: str) -> str | None:
    """Return the name of the preset of a dataset, given by its name or its id on the hub."""
    ids = {normalise_name(preset_name): preset_name for preset_name in PRESETS}
    ids |= {normalise_name(preset.hub): preset_name for preset_name, preset in PRESETS.items()}
    normalised = normalise_name(name)
    # tulu3_sft_mixture is tulu3_sft.
    return ids.get(normalised) or ids.get(normalised.removesuffix("mixture"))


def find_preset(name: str) -> Preset | None:
    """Return the preset of a dataset; None if it has none."""
    preset_name = find_preset_name(name)
    return None if preset_name is None else PRESETS[preset_name]


def as_list(value: Any, config: PeerConfig) -> Any:
    """Convert a single value to a list; a list stays unchanged."""
    return value if isinstance(value, list) else [value]


def normalise_name(name: str) -> str:
    """Return a dataset's name in lower case without punctuation, for comparisons."""
    return re.sub(r"[^a-z0-9]", "", name.lower())
