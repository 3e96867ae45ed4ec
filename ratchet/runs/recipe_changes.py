"""Change the recipe of a run that is resumed, and read back which recipe each of its steps had.

A key may change if a saved run can continue with its new value. Each change is recorded in
`provenance.json`, with the step after which it applies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from ratchet.config.loader import dump_plain, load_config
from ratchet.config.schema import STAGE_KEYS, RunConfig
from ratchet.errors import ConfigError, link_symptom
from ratchet.observe.provenance import read_changes

STAGES = "stages"
NEW_RUN_HINT = (
    "Start a new run from its weights: ratchet train RECIPE --from {run}. "
    f"{link_symptom('a-resume-is-refused')}"
)

OTHER_STATE = "the state in the checkpoint belongs to the old value"
OTHER_DATA = "the run's position in its data would no longer be valid"
# (pattern of keys, reason why these keys can't change, or None if they can). The first pattern that
# matches decides. Keys of a stage are matched without the stage's name.
RULES: Sequence[tuple[str, str | None]] = (
    ("logging.*", None),
    ("record.*", None),
    ("threads", None),
    ("cluster.*", None),
    ("steps", None),
    ("optimizer.kind", OTHER_STATE),
    ("optimizer.ema_decay", OTHER_STATE),
    ("optimizer.*", None),
    ("sampling.*", None),
    ("evaluation.*", None),
    ("eval_rewards*", None),
    ("checkpoint.*", None),
    ("sentinels.*", None),
    ("parity.*", None),
    ("rollouts.max_turns", None),
    ("rollouts.attempt_timeout_s", None),
    ("rollouts.retries", None),
    ("rollouts.max_failed_share", None),
    ("rollouts.max_replaced", None),
    ("rollouts.*", "the checkpoint holds groups that were begun with the old value"),
    ("generator*", None),
    ("weight_sync*", None),
    ("learner.kind", "a learner of another kind can't read the checkpoints"),
    ("learner.*", None),
    ("model.*", "the checkpoints hold the weights of the old model"),
    ("tokenizer*", "the model was trained on the tokens of the old tokenizer"),
    ("lora*", OTHER_STATE),
    ("algorithm*", "the run would continue as another experiment"),
    ("rewards*", "the run would continue as another experiment"),
    ("environment*", OTHER_DATA),
    ("agent*", OTHER_DATA),
    ("examples", OTHER_DATA),
    ("curriculum*", OTHER_DATA),
    ("batch_size", OTHER_DATA),
    ("*", "this key is fixed for the whole run"),
)


@dataclass(frozen=True)
class Change:
    """A changed key of a resolved recipe. `path` has the names of stages, not their indices."""

    path: tuple[str, ...]
    before: Any
    after: Any

    @property
    def key(self) -> str:
        return ".".join(self.path)

    @property
    def stage(self) -> str | None:
        """The name of the stage that the key belongs to; None for a key of the run."""
        return self.path[1] if self.path[0] == STAGES and len(self.path) > 1 else None

    def __str__(self) -> str:
        return f"{self.key}: {self.before} -> {self.after}"

    def as_json(self) -> dict[str, Any]:
        return {"key": self.key, "path": list(self.path), "from": self.before, "to": self.after}


def load_changed_config(path: Path, overrides: Sequence[str], *, run: str | Path) -> RunConfig:
    """Return the recipe of a run with changed keys.

    If the run has one stage, that stage's keys may be given without its name (`steps=200`).

    Args:
        path: The run's recipe.
        overrides: The changed keys, as key=value.
        run: The run's path or address, for error messages.

    Raises:
        ConfigError: A key can't change, or its value is wrong.
    """
    current = load_config(path)
    stages = current.stages
    full_overrides: list[str] = []
    problems: list[str] = []
    for override in overrides:
        key, equals, value = override.partition("=")
        key = key.strip()
        section = key.partition(".")[0]
        if len(stages) == 1 and section in STAGE_KEYS:
            key = f"{STAGES}.{stages[0].name}.{key}"
        full_overrides.append(f"{key}{equals}{value}")
        # A key that can't change is reported here, before its new value is validated. The last rule
        # also matches unknown keys, which `load_config` reports below.
        reason = _find_reason(Change(tuple(key.split(".")), None, None))
        if reason is None or reason is RULES[-1][1]:
            continue
        # A section may be overridden as a whole if those of its keys that can't change stay equal.
        if _may_resume_with(path, full_overrides[-1], current):
            continue
        problems.append(f"{key} can't change: {reason}")
    if problems:
        raise ConfigError("\n".join([*problems, NEW_RUN_HINT.format(run=run)]))
    return load_config(path, full_overrides)


def _may_resume_with(path: Path, override: str, current: RunConfig) -> bool:
    """Return True if an override changes nothing, or only keys of its section that may change."""
    try:
        changes = list_changes(current, load_config(path, [override]))
    except ConfigError:
        return False
    return all(_find_reason(change) is None for change in changes)


def list_changes(before: RunConfig, after: RunConfig) -> list[Change]:
    """Return the keys in which two recipes with the same stages differ."""
    old, new = dump_plain(before), dump_plain(after)
    names = [stage["name"] for stage in old[STAGES]]
    if names != [stage["name"] for stage in new[STAGES]]:
        return [Change((STAGES,), names, [stage["name"] for stage in new[STAGES]])]
    return _list_changes(_key_stages_by_name(old), _key_stages_by_name(new), ())


def _key_stages_by_name(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recipe in which the list of stages is a dict by their names."""
    return {**recipe, STAGES: {stage["name"]: stage for stage in recipe[STAGES]}}


def _list_changes(old: Any, new: Any, path: tuple[str, ...]) -> list[Change]:
    is_section = isinstance(old, Mapping) and isinstance(new, Mapping)
    # Sections of different kinds have different keys, so they change as a whole.
    if is_section and old.keys() == new.keys() and not any("." in key for key in old):
        return [change for key in old for change in _list_changes(old[key], new[key], (*path, key))]
    return [] if old == new and type(old) is type(new) else [Change(path, old, new)]


def check_changes(
    changes: Sequence[Change],
    config: RunConfig,
    *,
    step: int,
    n_finished_stages: int,
    run: str | Path,
) -> None:
    """Check that a run can continue with a changed recipe.

    Args:
        changes: The changed keys.
        config: The changed recipe.
        step: The step that the run continues after.
        n_finished_stages: The number of finished stages.
        run: The run's path or address, for error messages.

    Raises:
        ConfigError: A key can't change. The message names each such key with the reason, and says
            how to start a new run instead.
    """
    problems = []
    names = [stage.name for stage in config.stages]
    for change in changes:
        if change.stage is not None and names.index(change.stage) < n_finished_stages:
            problems.append(f"{change.key} can't change: stage {change.stage} is over")
        elif (reason := _find_reason(change)) is not None:
            problems.append(f"{change.key} can't change: {reason}")
    if problems:
        raise ConfigError("\n".join([*problems, NEW_RUN_HINT.format(run=run)]))
    index = min(n_finished_stages, len(names) - 1)
    n_earlier_steps = sum(stage.n_steps for stage in config.stages[:index])
    stage = config.stages[index]
    changes_steps = any(change.path == (STAGES, stage.name, "steps") for change in changes)
    if changes_steps and n_earlier_steps + stage.n_steps <= step:
        raise ConfigError(
            f"{STAGES}.{stage.name}.steps={stage.n_steps} is no more than the "
            f"{step - n_earlier_steps} steps that are done. Set it above "
            f"{step - n_earlier_steps}, or end here: ratchet convert {run}@{step} DIRECTORY"
        )


def _find_reason(change: Change) -> str | None:
    """Return why a key can't change, or None if it can."""
    key = ".".join(change.path[2:]) if change.stage is not None else change.key
    # A section may change as a whole, for example to another kind. Its name followed by ".kind"
    # matches the rules on its keys, such as "model.*".
    keys = [key, f"{key}.kind"]
    return next(
        (reason for pattern, reason in RULES if any(fnmatchcase(name, pattern) for name in keys)),
        None,
    )


def restore_earlier_config(config: RunConfig, provenance: Path, step: int) -> RunConfig:
    """Return the recipe that a run had when it computed the step after `step`.

    Args:
        config: The recipe that the run has now.
        provenance: The run's `provenance.json`.
        step: The number of steps that were finished by then.
    """
    later_entries = [entry for entry in read_changes(provenance) if entry["after_step"] > step]
    if not later_entries:
        return config
    recipe = _key_stages_by_name(dump_plain(config))
    for entry in reversed(later_entries):
        for change in reversed(entry["changes"]):
            *sections, last_key = change["path"]
            section = recipe
            for name in sections:
                section = section[name]
            section[last_key] = change["from"]
    return RunConfig.model_validate({**recipe, STAGES: list(recipe[STAGES].values())})
