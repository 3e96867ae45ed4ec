"""Define the properties that an algorithm claims unless its `exempt` gives a reason not to.

`ratchet.testing.algorithms.check_algorithm` tests both the claims and the exemptions. This module
imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping

PROPERTIES: Mapping[str, str] = {
    "isolated": "a row's loss depends on other rows only through its columns, such as advantages, "
    "and never on their token ids or logprobs",
    "on_policy": "if the policy equals the old policy, every ratio is 1 and the gradient is -sum "
    "of weight * A * grad log p, where A is the token's advantage, or for a loss at sequence level "
    "the mean advantage of the row",
    "equal_rewards": "if rewards and all of their parts are equal within each group, all "
    "advantages are exactly 0",
    "lone_attempt": "a group of one attempt gets advantages of exactly 0, or raises an error that "
    "names the group",
}

# Some properties do not apply to an algorithm without advantages. The reason of such an exemption
# begins with one of these texts, and `check_algorithm` tests that the algorithm has no advantages.
NOT_APPLICABLE = ("no advantages", "no policy gradient")


def is_applicable(reason: str) -> bool:
    """True if the exempted property applies to the algorithm, but does not hold.

    reason: the reason of the exemption. One that begins with a text of `NOT_APPLICABLE` says that
      the property does not apply.
    """
    return not reason.startswith(NOT_APPLICABLE)


def render_properties(exemptions: Mapping[str, Mapping[str, str]]) -> str:
    """Return the Markdown page that says which algorithm has which property.

    Args:
        exemptions: `Algorithm.exempt` by name of the algorithm.
    """
    lines = [
        "# Properties of the algorithms",
        "",
        "Every built-in algorithm is tested for the same invariances: its loss and its gradient "
        "don't depend on how a batch is",
        "cut into micro-batches, packed, ordered or sharded. Unless it is exempt, it is also "
        "tested for these properties.",
        "`ratchet check my_pkg.my_algo:MINE` runs the same tests on an algorithm of your own. The "
        "table shows the defaults; with",
        "other options, an algorithm has the exemptions of all its parts. This page is generated "
        "from the algorithms.",
        "",
        *(f"- `{name}`: {meaning}." for name, meaning in PROPERTIES.items()),
        "",
        f"| algorithm | {' | '.join(PROPERTIES)} |",
        f"| --- |{' --- |' * len(PROPERTIES)}",
    ]
    reasons: dict[str, int] = {}
    for algorithm, exempt in exemptions.items():
        cells = [_render_cell(reasons, exempt.get(name)) for name in PROPERTIES]
        lines.append(f"| `{algorithm}` | {' | '.join(cells)} |")
    lines += [
        "",
        "holds: claimed, and tested. exempt: does not hold, which is tested too. n/a: does not "
        "apply.",
        "",
    ]
    lines += [f"{number}. {reason}." for reason, number in reasons.items()]
    return "\n".join([*lines, ""])


def _render_cell(reasons: dict[str, int], reason: str | None) -> str:
    """Return a cell of the table, and number a new reason in `reasons`."""
    if reason is None:
        return "holds"
    number = reasons.setdefault(reason, len(reasons) + 1)
    return f"{'exempt' if is_applicable(reason) else 'n/a'} ({number})"
