"""The kit of algorithms for one that is named by its path, `my_pkg.my_algo:MINE`, and its findings as a table."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from ratchet.algorithms.base import Algorithm
from ratchet.algorithms.properties import page
from ratchet.config.kinds import KINDS, construct, imported, resolve
from ratchet.config.section import section_from_words
from ratchet.errors import ConfigError
from ratchet.testing.algorithms import Finding, examine

WIDTH = 128
# What the built-in algorithms without a complete default need; nothing is loaded from the paths.
NEEDED: Mapping[str, Mapping[str, Any]] = {
    "dr_grpo": {"fixed_length": 6},
    "on_policy_distillation": {"teacher": "path/of/a/model"},
    "distill_off_policy": {"teacher": "path/of/a/model"},
    "distill_on_policy": {"teacher": "path/of/a/model"},
}


def built_in(kind: str, **keys: Any) -> Algorithm:
    """A built-in algorithm with its defaults, but for some keys."""
    return construct(resolve("algorithm", {"kind": kind, **NEEDED.get(kind, {}), **keys}))


def properties_page() -> str:
    """docs/algorithms/properties.md"""
    return page({kind: built_in(kind).exempt for kind in KINDS["algorithm"]})


def check_named(path: str, overrides: Sequence[str] = ()) -> tuple[str, bool]:
    """(the table, whether everything holds that should)"""
    algorithm = named(path, overrides)
    findings = examine(algorithm)
    return table(algorithm, findings), all(finding.verdict != "fails" for finding in findings)


def named(path: str, overrides: Sequence[str] = ()) -> Algorithm:
    """The algorithm itself, or what the section, the class or the function makes, with `overrides` ("group_size=4") as its
    keys. Raises ConfigError where there is none."""
    target = imported(path)
    if isinstance(target, Algorithm):
        if overrides:
            raise ConfigError(f"'{path}' is an Algorithm, complete as it stands: override keys of a section or a function")
        return target
    if not callable(target):
        raise ConfigError(
            f"'{path}' is {_article(target)}: name an Algorithm, a section, or a function that makes an Algorithm"
        )
    made = construct(section_from_words("algorithm", path, overrides))
    if not isinstance(made, Algorithm):
        raise ConfigError(f"'{path}' makes {_article(made)}, not an Algorithm")
    return made


def table(algorithm: Algorithm, findings: Sequence[Finding]) -> str:
    """A line for each finding, what is wrong or why it is exempt beside it."""
    width = max(len(finding.name) for finding in findings)
    lines = [f"{algorithm.name}: {algorithm.source}, micro-batches by {algorithm.unit}", ""]
    for finding in findings:
        head = f"  {finding.name:<{width}}  {finding.verdict:<6}"
        lines += textwrap.wrap(f"{head}  {finding.note}".rstrip(), WIDTH, subsequent_indent=" " * (len(head) + 2))
    return "\n".join(lines)


def _article(found: object) -> str:
    name = type(found).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"
