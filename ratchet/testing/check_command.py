"""Check an algorithm, environment or reward by import path (`my_pkg.my_mod:Thing`).

The findings are rendered as a table.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ratchet.algorithms.base import Algorithm
from ratchet.algorithms.properties import render_properties
from ratchet.config.base import Section
from ratchet.config.from_words import section_from_words
from ratchet.config.peer_names import find_reward_kind
from ratchet.config.registry import KINDS
from ratchet.config.resolve import build, import_object, resolve
from ratchet.errors import ConfigError
from ratchet.rewards.base import as_reward
from ratchet.testing.algorithms import Finding, examine
from ratchet.testing.environments import DEADLINE_S, list_environment_checks
from ratchet.testing.harness import DeadlineCaller, run_supervised
from ratchet.testing.rewards import SAMPLE, list_reward_checks

WIDTH = 128
# Keys that built-in algorithms require. Nothing is loaded from the paths.
REQUIRED_KEYS: Mapping[str, Mapping[str, Any]] = {
    "dr_grpo": {"fixed_length": 6},
    "on_policy_distillation": {"teacher": "path/of/a/model"},
    "distill_off_policy": {"teacher": "path/of/a/model"},
    "distill_on_policy": {"teacher": "path/of/a/model"},
}


def build_builtin(kind: str, **keys: Any) -> Algorithm:
    """Return a built-in algorithm with its defaults, except for `keys`."""
    return build(resolve("algorithm", {"kind": kind, **REQUIRED_KEYS.get(kind, {}), **keys}))


def properties_page() -> str:
    """Return the content of docs/algorithms/properties.md."""
    return render_properties({kind: build_builtin(kind).exempt for kind in KINDS["algorithm"]})


def check_named(path: str, overrides: Sequence[str] = ()) -> tuple[str, bool]:
    """Check the object at an import path, and return (the table, True if no check failed)."""
    slot = _find_slot(import_object(path))
    if slot != "algorithm":
        return _run_checks(path, slot, overrides)
    algorithm = find_algorithm(path, overrides)
    findings = examine(algorithm)
    return format_findings(algorithm, findings), all(
        finding.verdict != "fails" for finding in findings
    )


def _find_slot(target: object) -> str:
    """Return the slot of an object by its methods.

    A function of (trajectory, task, ...) or with the parameters of another library's reward
    functions is a reward.
    """
    inspected = target
    if inspect.isclass(target) and issubclass(target, Section) and target.builds:
        inspected = import_object(target.builds)
    if all(hasattr(inspected, method) for method in ("tasks", "reset", "step")):
        return "environment"
    if hasattr(inspected, "score") or hasattr(inspected, "judge"):
        return "rewards"
    if inspect.isfunction(inspected) and (
        list(inspect.signature(inspected).parameters)[1:2] == ["task"]
        or find_reward_kind(inspected) is not None
    ):
        return "rewards"
    return "algorithm"


def _run_checks(path: str, slot: str, overrides: Sequence[str]) -> tuple[str, bool]:
    target = import_object(path)
    is_instance = not callable(target)  # an instance, which takes no keys
    instance = target if is_instance else build(section_from_words(slot, path, overrides))
    checks: Mapping[str, Callable[[DeadlineCaller], None]]
    checks = (
        list_environment_checks(instance)
        if slot == "environment"
        else list_reward_checks(as_reward(instance), SAMPLE)
    )
    width = max(len(name) for name in checks)
    lines = [f"{path}: {'an environment' if slot == 'environment' else 'a reward'}", ""]
    failure = ""
    for name, check in checks.items():
        if failure:
            lines.append(f"  {name:<{width}}  n/a    an earlier check failed")
            continue
        try:
            run_supervised(check, DEADLINE_S)
        except Exception as error:  # user code may raise anything, and that is the finding
            failure = (
                f"{error}"
                if isinstance(error, AssertionError)
                else f"{type(error).__name__}: {error}"
            )
        head = f"  {name:<{width}}  {'fails' if failure else 'holds'}"
        lines += textwrap.wrap(
            f"{head}  {failure}".rstrip(), WIDTH, subsequent_indent=" " * (width + 11)
        )
    return "\n".join(lines), not failure


def find_algorithm(path: str, overrides: Sequence[str] = ()) -> Algorithm:
    """Return the algorithm at an import path.

    If the path names a section, class or function, the algorithm is built from it, with `overrides`
    ("group_size=4") as its keys. Raises ConfigError if there is no algorithm.
    """
    target = import_object(path)
    if isinstance(target, Algorithm):
        if overrides:
            raise ConfigError(
                f"'{path}' is an Algorithm object, which takes no overrides: remove them, or name "
                "the section or function that builds it"
            )
        return target
    if not callable(target):
        raise ConfigError(
            f"'{path}' is {_name_type(target)}: name an Algorithm, a section, or a function that "
            "makes an Algorithm"
        )
    algorithm = build(section_from_words("algorithm", path, overrides))
    if not isinstance(algorithm, Algorithm):
        raise ConfigError(
            f"'{path}' makes {_name_type(algorithm)}, not an Algorithm. A reward takes "
            "(trajectory, task)"
        )
    return algorithm


def format_findings(algorithm: Algorithm, findings: Sequence[Finding]) -> str:
    """Return a table with a row for each finding and a note of what fails or why it is exempt."""
    width = max(len(finding.name) for finding in findings)
    lines = [f"{algorithm.name}: {algorithm.source}, micro-batches by {algorithm.unit}", ""]
    for finding in findings:
        head = f"  {finding.name:<{width}}  {finding.verdict:<6}"
        lines += textwrap.wrap(
            f"{head}  {finding.note}".rstrip(), WIDTH, subsequent_indent=" " * (len(head) + 2)
        )
    return "\n".join(lines)


def _name_type(value: object) -> str:
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"
