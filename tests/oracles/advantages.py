"""Advantages that are one number an attempt, or one pass over a row's rewards: the papers'
formulas, over python lists.

Everything that is said to be exactly 0 is so because it is never computed: a rounding error divided
by a tiny std is not 0.
"""

from __future__ import annotations

import math

from oracles.ragged import Ragged, Row, in_order

Attempt = tuple[str, int]


def mean_of(numbers: list[float]) -> float:
    return math.fsum(numbers) / len(numbers)


def std_of(numbers: list[float], ddof: int) -> float:
    mean = mean_of(numbers)
    return math.sqrt(math.fsum((x - mean) ** 2 for x in numbers) / (len(numbers) - ddof))


def standardised(
    numbers: list[float], *, epsilon: float, ddof: int = 1, divide: bool = True
) -> list[float]:
    """(x - mean) / (std + epsilon); exactly 0 where all are equal, as a single number is to
    itself."""
    if not numbers or min(numbers) == max(numbers):
        return [0.0] * len(numbers)
    mean = mean_of(numbers)
    scale = std_of(numbers, ddof) + epsilon if divide else 1.0
    return [(x - mean) / scale for x in numbers]


def attempt_rewards(rows: list[Row], group: str) -> dict[int, float]:
    """Reward by attempt, over the attempts of a group that were sampled for training and judged. An
    attempt whose history forked is several rows and one reward."""
    rewards: dict[int, float] = {}
    for row in rows:
        if row.group == group and row.learns_from_reward:
            assert row.reward is not None
            assert rewards.get(row.attempt, row.reward) == row.reward, (
                "the rows of one attempt share its reward"
            )
            rewards[row.attempt] = row.reward
    return rewards


def attempt_returns(rows: list[Row], group: str) -> dict[int, float]:
    """An attempt's reward, with all dense rewards that its rows got on the way."""
    returns = {}
    for attempt, reward in attempt_rewards(rows, group).items():
        own = [
            row
            for row in rows
            if (row.group, row.attempt) == (group, attempt) and row.learns_from_reward
        ]
        returns[attempt] = reward + math.fsum(r for row in own for r in row.token_rewards)
    return returns


def by_row(rows: list[Row], per_attempt: dict[Attempt, float]) -> list[float]:
    """The number of each row's attempt; 0 for rows that no statistic counts."""
    return [per_attempt[row.group, row.attempt] if row.learns_from_reward else 0.0 for row in rows]


def on_tokens(rows: list[Row], advantages: list[float]) -> Ragged:
    """Every trained token of a row carries the row's advantage; all others carry 0."""
    return [
        [a if trains else 0.0 for trains in row.mask]
        for row, a in zip(rows, advantages, strict=True)
    ]


def group_relative(rows: list[Row], *, scale: str, epsilon: float) -> list[float]:
    """DeepSeekMath, arXiv:2402.03300, section 4.1.2: (R - mean) / (std + epsilon) over the attempts
    of a group with the sample std (ddof = 1); R - mean where scale="none": Dr. GRPO,
    arXiv:2503.20783; scale="batch_std" divides by the sample std of all attempts: LitePPO,
    arXiv:2508.08221."""
    found: dict[Attempt, float] = {}
    of_all = [r for group in in_order(rows) for r in attempt_returns(rows, group).values()]
    divisor = std_of(of_all, 1) + epsilon if scale == "batch_std" and len(of_all) > 1 else 1.0
    for group in in_order(rows):
        returns = attempt_returns(rows, group)
        values = standardised(list(returns.values()), epsilon=epsilon, divide=scale == "std")
        found |= {(group, attempt): a / divisor for attempt, a in zip(returns, values, strict=True)}
    return by_row(rows, found)


def rloo(rows: list[Row]) -> list[float]:
    """arXiv:2402.14740, eq. 8: the baseline of an attempt is the mean of the others."""
    found: dict[Attempt, float] = {}
    for group in in_order(rows):
        returns = attempt_returns(rows, group)
        for attempt, value in returns.items():
            others = [r for other, r in returns.items() if other != attempt]
            equal = not others or (min(others) == max(others) == value)
            found[group, attempt] = 0.0 if equal else value - mean_of(others)
    return by_row(rows, found)


def remax(rows: list[Row]) -> tuple[list[float], list[bool]]:
    """arXiv:2310.10505, eq. 5: the baseline is the reward of the greedy answer. (advantages,
    whether the row still trains): a group without a judged greedy answer has nothing to compare
    with, and is left out."""
    found: dict[Attempt, float] = {}
    greedy = {
        row.group: row.reward for row in rows if row.use == "baseline" and row.reward is not None
    }
    for group in in_order(rows):
        for attempt, value in attempt_returns(rows, group).items():
            found[group, attempt] = value - greedy[group] if group in greedy else 0.0
    return by_row(rows, found), [row.takes_part and row.group in greedy for row in rows]


def opo(rows: list[Row]) -> list[float]:
    """arXiv:2505.23585, eq. 6: the baseline is the mean reward weighted by length, which minimises
    the gradient's variance."""
    found: dict[Attempt, float] = {}
    for group in in_order(rows):
        returns = attempt_returns(rows, group)
        lengths = dict.fromkeys(returns, 0)
        for row in rows:
            if row.group == group and row.learns_from_reward:
                lengths[row.attempt] += len(row.steps)
        if sum(lengths.values()) == 0:
            lengths = dict.fromkeys(returns, 1)
        for attempt, value in returns.items():
            baseline = math.fsum(lengths[a] * r for a, r in returns.items()) / sum(lengths.values())
            equal = min(returns.values()) == max(returns.values())
            found[group, attempt] = 0.0 if equal else value - baseline
    return by_row(rows, found)


def gdpo(rows: list[Row], *, weights: dict[str, float] | None, epsilon: float) -> list[float]:
    """arXiv:2601.05242, eq. 4-6: each part is normalised in its group by itself, the weighted sum
    over the whole batch."""
    parts: dict[Attempt, dict[str, float]] = {
        (row.group, row.attempt): row.parts
        for row in rows
        if row.learns_from_reward and row.reward is not None
    }
    names = (
        sorted({name for own in parts.values() for name in own})
        if weights is None
        else list(weights)
    )
    total = dict.fromkeys(parts, 0.0)
    for name in names:
        for group in in_order(rows):
            having = [key for key, own in parts.items() if key[0] == group and name in own]
            values = standardised([parts[key][name] for key in having], epsilon=epsilon)
            for key, value in zip(having, values, strict=True):
                total[key] += value * (1.0 if weights is None else weights[name])
    whole = standardised(list(total.values()), epsilon=epsilon)
    return by_row(rows, dict(zip(total, whole, strict=True)))


def returns_to_go(rows: list[Row], *, baseline: str) -> Ragged:
    """What REINFORCE++ whitens: at each step, the row's reward (less its group's mean) and the
    dense rewards still to come."""
    found: Ragged = []
    for i, row in enumerate(rows):
        out = [0.0] * len(row.tokens)
        if row.learns_from_reward:
            assert row.reward is not None
            rewards = list(attempt_rewards(rows, row.group).values())
            own = row.reward
            if baseline == "group":
                own = 0.0 if min(rewards) == max(rewards) else own - mean_of(rewards)
            later = [
                other
                for other in rows[i + 1 :]
                if (other.group, other.attempt) == (row.group, row.attempt)
            ]
            # the history forked
            after = math.fsum(math.fsum(other.token_rewards) for other in later)
            for t in row.steps:
                out[t] = own + math.fsum(row.token_rewards[t:]) + after
        found.append(out)
    return found


def reinforce_pp(rows: list[Row], *, baseline: str, epsilon: float) -> Ragged:
    """arXiv:2501.03262, eq. 8-9: whitened over all steps of the batch."""
    places = [(i, t) for i, row in enumerate(rows) if row.learns_from_reward for t in row.steps]
    raw = returns_to_go(rows, baseline=baseline)
    out = [[0.0] * len(row.tokens) for row in rows]
    white = standardised([raw[i][t] for i, t in places], epsilon=epsilon, ddof=0)
    for (i, t), value in zip(places, white, strict=True):
        out[i][t] = value
    return out


# --- what turns one column of advantages into another


def mixture(parts: list[tuple[Ragged, float]]) -> Ragged:
    return [
        [math.fsum(w * a[i][t] for a, w in parts) for t in range(len(row))]
        for i, row in enumerate(parts[0][0])
    ]


def clip(ragged: Ragged, limit: float) -> Ragged:
    return [[min(max(x, -limit), limit) for x in row] for row in ragged]


def whiten(rows: list[Row], ragged: Ragged, *, epsilon: float) -> Ragged:
    """Over all trained tokens of the batch, judged or not."""
    places = [(i, t) for i, row in enumerate(rows) for t in row.steps]
    out = [[0.0] * len(row) for row in ragged]
    for (i, t), value in zip(
        places,
        standardised([ragged[i][t] for i, t in places], epsilon=epsilon, ddof=0),
        strict=True,
    ):
        out[i][t] = value
    return out
