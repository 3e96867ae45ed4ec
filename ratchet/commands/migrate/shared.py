"""Conversions and notes that the tables of several peers share."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from ratchet.commands.migrate import numbers
from ratchet.commands.migrate.table import PeerConfig, Sets, Without
from ratchet.data.presets.datasets import PRESETS

FLOAT32 = (
    "weights train in float32, and on an accelerator products are in bfloat16; "
    "learner.kind=megatron has weights: bfloat16"
)
PACKED = "rows are always packed end to end, without padding: there is nothing to set"
MICRO = (
    "a micro-batch is counted in tokens here (learner.micro_batch_tokens, auto by default), and "
    "its size changes memory and "
    "speed, never the result"
)
BASE = "the file that the command begins with is not read: import it, and set these over it"
CACHE = "vLLM's cache is bounded in GiB here (generator.kv_cache_gib), not as a share of the device"
EPOCHS = "steps are counted here, not passes over the data: set steps to passes x rows / batch_size"
NUMERICS = "has no switch here: the learner chooses how it computes"
LOADER = "rows are drawn as a function of seed and position: there is no loader to set up"
OWN_REWARD = (
    "a function of yours takes (trajectory, task) here and returns a number or named parts: "
    "`ratchet new reward NAME` begins "
    "one; then set rewards: [{kind: NAME:NAME}]"
)
ROWS = (
    "rows are read by their columns prompt and answer here, or as environment.columns says: "
    "see "
    "`ratchet data inspect`"
)
PAIRS = (
    "pairs are read by their columns prompt, chosen and rejected here, or as "
    "environment.columns says (`ratchet data inspect`)"
)
FILE = re.compile(r"\.(parquet|jsonl?|csv|arrow)$|^[~/.]|://")
TRACKERS = ("wandb", "mlflow", "swanlab", "trackio")
KL_FORWARD = (
    "differentiated as it stands, their k3 has the gradient of KL(reference || policy): that is "
    "objective forward here; for "
    "KL(policy || reference) set objective: reverse"
)


def share(value: Any, steps: int | None, rounded: Callable[[float], int]) -> Any:
    """Convert a share of all optimizer steps to a number of steps, rounded as the peer rounds."""
    part = numbers.number(value)
    if part == 0:
        return 0
    if steps is None:
        return Without(
            "a share of all steps, whose number the file doesn't give: set optimizer.warmup_steps"
        )
    return rounded(part * steps)


def betas(first: str, second: str) -> Any:
    """Return the conversion of a peer's two keys to `optimizer.betas`."""
    return lambda value, config: [config.number(first), config.number(second)]


def model(value: Any, config: PeerConfig) -> Any:
    return str(value)


def template(value: Any, config: PeerConfig) -> Any:
    if str(value).endswith(".jinja"):
        return value
    return Without("its text goes into a .jinja file, and that file's path into tokenizer.template")


def norm(value: Any, config: PeerConfig) -> Any:
    """Convert a maximum gradient norm: 0 turns clipping off in the peer, null does here."""
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
    rest = {"logging.tensorboard": "tensorboard" in names} if has_tensorboard else {}
    values: dict[str, Any] = {**rest, **({"logging.sinks": trackers} if trackers else {})}
    others = [
        name
        for name in names
        if name not in (*TRACKERS, "tensorboard", "none", "console", "stdout")
    ]
    if not values:
        return Without(
            "metrics always go to metrics.jsonl and the terminal"
            + (f"; {', '.join(others)} has no sink here" if others else "")
        )
    return Sets(values, f"{', '.join(others)} has no sink here (logging.sinks)" if others else "")


def rows(value: Any, config: PeerConfig) -> Any:
    """Convert the names of data: files, a published dataset, or an id on the hub."""
    names = [str(name) for name in (value if isinstance(value, list) else [value])]
    if all(FILE.search(name) for name in names):
        return Sets({"environment.train": names})
    others = (
        f"{', '.join(names[1:])} beside it: environment.kind=mixture has parts"
        if len(names) > 1
        else ""
    )
    ids = {_bare(name): name for name in PRESETS} | {
        _bare(preset.hub): name for name, preset in PRESETS.items()
    }
    dataset = ids.get(_bare(names[0]))
    note = "the preset says what its columns mean (docs/data.md)" if dataset else ""
    return Sets(
        {"environment.preset": dataset} if dataset else {"environment.hub": names[0]},
        "; ".join(filter(None, [note, others])),
    )


def listed(value: Any, config: PeerConfig) -> Any:
    return value if isinstance(value, list) else [value]


def _bare(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
