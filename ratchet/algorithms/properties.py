"""Define the properties that an algorithm claims unless its `exempt` gives a reason not to.

`ratchet.testing.algorithms.check_algorithm` tests both the claims and the exemptions. This module
imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping

PROPERTIES: Mapping[str, str] = {
    "isolated": "other trajectories' token ids and logprobs never change a row's own loss, given "
    "its columns (advantages and "
    "the like, which may be made of many rows)",
    "on_policy": "where the policy is the old policy, every ratio is 1 and the gradient is -sum of "
    "weight * A * grad log p, A "
    "the advantages, or for a loss of whole sequences their mean over the row",
    "equal_rewards": "equal rewards in every group, part by part, give advantages of exactly 0",
    "lone_attempt": "a group of one attempt is refused by its name, or gets advantages of exactly "
    "0",
}

# An exemption whose reason begins with one of these says that the property does not apply, because
# the algorithm has no advantages. `check_algorithm` tests that it has none.
NOT_APPLICABLE = ("no advantages", "no policy gradient")


def is_applicable(reason: str) -> bool:
    """True unless the reason of an exemption says that the property does not apply."""
    return not reason.startswith(NOT_APPLICABLE)


def render_properties(exemptions: Mapping[str, Mapping[str, str]]) -> str:
    """Return a Markdown page of the properties and of the algorithms that claim them.

    Args:
        exemptions: `Algorithm.exempt` by name of the algorithm.
    """
    lines = [
        "# Properties of the algorithms",
        "",
        "Every built-in algorithm is held to the same invariances (its loss and its gradient don't "
        "depend on how a batch is",
        "cut into micro-batches, packed, ordered or sharded) and, unless it is exempt, to these "
        "properties. `ratchet check",
        "my_pkg.my_algo:MINE` holds an algorithm of your own to the same. Here are the defaults; "
        "with other options an",
        "algorithm is exempt from what its parts are exempt from. This page is generated from the "
        "algorithms themselves.",
        "",
        *(f"- `{name}`: {meaning}." for name, meaning in PROPERTIES.items()),
        "",
        f"| algorithm | {' | '.join(PROPERTIES)} |",
        f"| --- |{' --- |' * len(PROPERTIES)}",
    ]
    reasons: dict[str, int] = {}
    for algorithm, exempt in exemptions.items():
        cells = [_cell(reasons, exempt.get(name)) for name in PROPERTIES]
        lines.append(f"| `{algorithm}` | {' | '.join(cells)} |")
    lines += [
        "",
        "holds: claimed and checked. exempt: does not hold, checked too. n/a: has no such thing.",
        "",
    ]
    lines += [f"{number}. {reason}." for reason, number in reasons.items()]
    return "\n".join([*lines, ""])


def _cell(reasons: dict[str, int], reason: str | None) -> str:
    if reason is None:
        return "holds"
    number = reasons.setdefault(reason, len(reasons) + 1)
    return f"{'exempt' if is_applicable(reason) else 'n/a'} ({number})"
