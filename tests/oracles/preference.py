"""Losses on pairs and on labelled answers, with their derivative by every token's live logprob,
worked out by hand.

A pair is the two training rows of a group, the chosen one first. Every function gives x, one number
a pair (or a row), and dx/dlogprob, one number a token: a token moves the x of its own pair (or row)
alone. With s the logistic function,

    d/du -log s(u) = -s(-u)

and a row's summed (mean) logprob has the derivative 1 (1 / |y|) by each of its |y| trained tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from oracles.ragged import Ragged, Row, in_order


def sigmoid(u: float) -> float:
    return 1.0 / (1.0 + math.exp(-u)) if u >= 0 else math.exp(u) / (1.0 + math.exp(u))


def minus_log_sigmoid(u: float) -> float:
    return math.log1p(math.exp(-u)) if u >= 0 else -u + math.log1p(math.exp(u))


def pairs(rows: list[Row]) -> list[tuple[int, int]]:
    """(index of the chosen row, index of the rejected row) of every group."""
    found = []
    for group in in_order(rows):
        members = [i for i, row in enumerate(rows) if row.group == group and row.takes_part]
        assert len(members) == 2, f"{group} is not a pair"
        found.append((members[0], members[1]))
    return found


def on_trained(row: Row, values: list[float]) -> list[float]:
    return [value for trains, value in zip(row.mask, values, strict=True) if trains]


def mean(values: list[float]) -> float:
    """0 for a row without a trained token."""
    return math.fsum(values) / len(values) if values else 0.0


def summary(row: Row, values: list[float], normalize: str) -> float:
    kept = on_trained(row, values)
    return math.fsum(kept) if normalize == "sum" else mean(kept)


def log_ratio(row: Row, normalize: str = "sum") -> float:
    """log pi(y) / pi_ref(y) over the trained tokens of a row, or its mean by token."""
    return summary(
        row, [lp - ref for lp, ref in zip(row.logprobs, row.ref_logprobs, strict=True)], normalize
    )


def spread(row: Row, slope: float, normalize: str) -> list[float]:
    """d/dlogprob_t of slope * (the row's sum or mean)."""
    count = sum(row.mask)
    share = 1.0 if normalize == "sum" else 1.0 / max(count, 1)
    return [slope * share if trains else 0.0 for trains in row.mask]


def over_pairs(
    rows: list[Row],
    normalize: str,
    of_row: Callable[[Row], float],
    of_pair: Callable[..., tuple[float, float, float]],
) -> tuple[list[float], Ragged]:
    """`of_pair(a, b, chosen, rejected)` -> (x, dx/da, dx/db), with a and b the numbers `of_row` of
    chosen and rejected."""
    values: list[float] = []
    slopes: Ragged = [[0.0] * len(row.tokens) for row in rows]
    for c, r in pairs(rows):
        x, by_chosen, by_rejected = of_pair(of_row(rows[c]), of_row(rows[r]), rows[c], rows[r])
        values.append(x)
        slopes[c] = spread(rows[c], by_chosen, normalize)
        slopes[r] = spread(rows[r], by_rejected, normalize)
    return values, slopes


def over_margins(
    rows: list[Row], normalize: str, loss: Callable[[float, Row, Row], tuple[float, float]]
) -> tuple[list[float], Ragged]:
    """`loss(D, chosen, rejected)` -> (x, dx/dD), with D the margin between the two log ratios."""

    def of_pair(a: float, b: float, chosen: Row, rejected: Row) -> tuple[float, float, float]:
        x, slope = loss(a - b, chosen, rejected)
        return x, slope, -slope

    return over_pairs(rows, normalize, lambda row: log_ratio(row, normalize), of_pair)


def dpo(
    rows: list[Row], *, beta: float, label_smoothing: float = 0.0, normalize: str = "sum"
) -> tuple[list[float], Ragged]:
    """arXiv:2305.18290 eq. 7; with a share e of labels taken as flipped: -(1 - e) log s(beta D) - e
    log s(-beta D)."""
    e = label_smoothing

    def loss(d: float, *_: Row) -> tuple[float, float]:
        x = (1 - e) * minus_log_sigmoid(beta * d) + e * minus_log_sigmoid(-beta * d)
        return x, beta * (e * sigmoid(beta * d) - (1 - e) * sigmoid(-beta * d))

    return over_margins(rows, normalize, loss)


def ipo(rows: list[Row], *, beta: float, normalize: str = "sum") -> tuple[list[float], Ragged]:
    """arXiv:2310.12036 eq. 17: (D - 1 / (2 beta))^2."""

    def loss(d: float, *_: Row) -> tuple[float, float]:
        gap = d - 1 / (2 * beta)
        return gap * gap, 2 * gap

    return over_margins(rows, normalize, loss)


def rpo(
    rows: list[Row], *, beta: float, eta: float, normalize: str = "sum"
) -> tuple[list[float], Ragged]:
    """arXiv:2406.11704 section 3.3.2: KL between Bernoullis, b = s(eta (r_c - r_r)) from a = s(beta
    D).

    With a = s(u): d/du -(b log a + (1 - b) log(1 - a)) = -b (1 - a) + (1 - b) a = a - b.
    """

    def loss(d: float, chosen: Row, rejected: Row) -> tuple[float, float]:
        assert chosen.reward is not None
        assert rejected.reward is not None
        b, a = sigmoid(eta * (chosen.reward - rejected.reward)), sigmoid(beta * d)
        return b * math.log(b / a) + (1 - b) * math.log((1 - b) / (1 - a)), beta * (a - b)

    return over_margins(rows, normalize, loss)


def simpo(rows: list[Row], *, beta: float, gamma: float) -> tuple[list[float], Ragged]:
    """arXiv:2405.14734 eq. 6: -log s(beta / |y_c| log pi(y_c) - beta / |y_r| log pi(y_r) - gamma).
    No reference."""

    def of_pair(a: float, b: float, *_: Row) -> tuple[float, float, float]:
        u = beta * a - beta * b - gamma
        slope = -beta * sigmoid(-u)
        return minus_log_sigmoid(u), slope, -slope

    return over_pairs(rows, "mean", lambda row: summary(row, row.logprobs, "mean"), of_pair)


def odds_ratio(rows: list[Row]) -> tuple[list[float], Ragged]:
    """ORPO, arXiv:2403.07691 eq. 5 to 7: -log s(log odds_c - log odds_r), odds = P / (1 - P), log P
    = mean logprob.

    d log odds / d log P = 1 + P / (1 - P) = 1 / (1 - P). Not defined for P = 1, as a row without a
    token has.
    """

    def of_pair(a: float, b: float, *_: Row) -> tuple[float, float, float]:
        u = (a - math.log(-math.expm1(a))) - (b - math.log(-math.expm1(b)))
        slope = -sigmoid(-u)
        return minus_log_sigmoid(u), slope / -math.expm1(a), -slope / -math.expm1(b)

    return over_pairs(rows, "mean", lambda row: summary(row, row.logprobs, "mean"), of_pair)


def kto_reference_point(rows: list[Row]) -> float:
    """arXiv:2402.01306 section 4.1: z0 = max(0, 1/m sum_j log pi(y_j | x_j) / pi_ref(y_j | x_j))
    over the m mismatched rows, which do not train: here `trained` and not `mask` says which tokens
    are the answer's."""
    sums = []
    for row in rows:
        if row.use == "reference":
            columns = zip(row.trained, row.old_logprobs, row.ref_logprobs, strict=True)
            sums.append(math.fsum(old - ref for answer, old, ref in columns if answer))
    return max(0.0, mean(sums))


def kto(
    rows: list[Row], *, z0: float, beta: float, desirable: float = 1.0, undesirable: float = 1.0
) -> tuple[list[float], Ragged]:
    """arXiv:2402.01306 eq. 8: lambda_y - v(x, y); one x a row, those of rows that do not take part
    are 0.

    v = lambda_D s(beta (log ratio - z0)) where the answer is desirable, lambda_U s(beta (z0 - log
    ratio)) where it is not. s'(u) = s(u) s(-u), and nothing flows through z0.
    """
    values: list[float] = []
    slopes: Ragged = []
    for row in rows:
        if not row.takes_part:
            values.append(0.0)
            slopes.append([0.0] * len(row.tokens))
            continue
        assert row.reward is not None
        good = row.reward > 0
        weight, sign = (desirable, 1.0) if good else (undesirable, -1.0)
        u = sign * beta * (log_ratio(row) - z0)
        values.append(weight * sigmoid(-u))
        slopes.append(spread(row, -weight * sign * beta * sigmoid(u) * sigmoid(-u), "sum"))
    return values, slopes


def chosen_mean(rows: list[Row], x: Ragged) -> float:
    """The token mean over the chosen rows alone."""
    chosen = {c for c, _ in pairs(rows)}
    return mean(
        [value for i, row in enumerate(rows) if i in chosen for value in on_trained(row, x[i])]
    )
