"""Divergences between a teacher p and a student q over K tokens and one bucket that holds what is
left of the mass.

Each is a sum over outcomes of F(p_i, q_i). The student is given by its K logprobs l_k alone, and
the bucket's mass is q_0 = 1 - sum_k exp(l_k), so that

    dx/dl_k = q_k (F_q(p_k, q_k) - F_q(p_0, q_0))

with F_q the derivative by the second argument, and the last term absent where there is no bucket.
"""

from __future__ import annotations

import math


def outcome(objective: str, p: float, q: float, mix: float) -> tuple[float, float]:
    """(F, F_q) of one outcome.

    forward          p log(p / q)                                 -p / q
    reverse          q log(q / p)                                 log(q / p) + 1
    js               mix p log(p / m) + (1 - mix) q log(q / m)    (1 - mix) log(q / m)             m = mix p + (1 - mix) q
    skewed_forward   p log(p / m)                                 -(1 - mix) p / m                 m = mix p + (1 - mix) q
    skewed_reverse   q log(q / m)                                 log(q / m) + 1 - mix q / m       m = (1 - mix) p + mix q
    mixed            mix forward + (1 - mix) reverse
    adaptive         as mixed, with `head_share` in place of mix, which is not differentiated

    arXiv:2306.13649 eq. 2 (generalised Jensen-Shannon), arXiv:2402.03898 eq. 4 and 5 (skewed). In
    js the two terms that come from m cancel against the derivative of q log q: -(mix p + (1 - mix)
    q) / m + 1 = 0.
    """
    if objective == "forward":
        return p * math.log(p / q), -p / q
    if objective == "reverse":
        return q * math.log(q / p), math.log(q / p) + 1
    if objective == "mixed":
        (f, f_q), (r, r_q) = outcome("forward", p, q, mix), outcome("reverse", p, q, mix)
        return mix * f + (1 - mix) * r, mix * f_q + (1 - mix) * r_q
    if objective == "skewed_reverse":
        m = (1 - mix) * p + mix * q
        return q * math.log(q / m), math.log(q / m) + 1 - mix * q / m
    m = mix * p + (1 - mix) * q
    if objective == "skewed_forward":
        return p * math.log(p / m), -(1 - mix) * p / m
    assert objective == "js"
    return mix * p * math.log(p / m) + (1 - mix) * q * math.log(q / m), (1 - mix) * math.log(q / m)


def head_share(p: list[float], q: list[float], *, mix: float, bucket: bool) -> float:
    """g_head / (g_head + g_tail) of adaptive KL, arXiv:2404.02657: |p - q| of the likeliest tokens
    of p that together have the probability mix, as a share of that of all. The bucket comes last."""
    outcomes = sorted(zip(p, q, strict=True), key=lambda pair: -pair[0])
    if bucket:
        outcomes.append((1 - math.fsum(p), 1 - math.fsum(q)))
    head = total = mass = 0.0
    for p_i, q_i in outcomes:
        total += abs(p_i - q_i)
        if mass < mix:
            head += abs(p_i - q_i)
        mass += p_i
    return head / total if total else 0.5


def divergence(
    objective: str, teacher: list[float], student: list[float], *, mix: float, bucket: bool
) -> tuple[float, list[float]]:
    """(x, dx/dl_k) from the logprobs that both give to the same K tokens."""
    p, q = [math.exp(lp) for lp in teacher], [math.exp(lp) for lp in student]
    if objective == "adaptive":
        mix = head_share(p, q, mix=mix, bucket=bucket)
        objective = "mixed"
    shared = 0.0
    values = []
    if bucket:
        f, shared = outcome(objective, 1 - math.fsum(p), 1 - math.fsum(q), mix)
        values.append(f)
    slopes = []
    for p_k, q_k in zip(p, q, strict=True):
        f, f_q = outcome(objective, p_k, q_k, mix)
        values.append(f)
        slopes.append(q_k * (f_q - shared))
    return math.fsum(values), slopes


def by_logits(
    objective: str, teacher: list[float], student: list[float], *, mix: float
) -> tuple[float, list[float]]:
    """(x, dx/dz_j) over the whole vocabulary, the student being softmax(z): dl_k/dz_j = [k = j] -
    q_j."""
    x, slopes = divergence(objective, teacher, student, mix=mix, bucket=False)
    total = math.fsum(slopes)
    return x, [slope - math.exp(lq) * total for slope, lq in zip(slopes, student, strict=True)]


def with_likelihood(
    objective: str,
    teacher: list[float],
    student: list[float],
    token: int,
    *,
    mix: float,
    coef: float,
) -> tuple[float, list[float]]:
    """(x, dx/dz_j) of the divergence plus coef times -log q of the token that stands there, whose
    gradient is q_j - [j = token]."""
    x, slopes = by_logits(objective, teacher, student, mix=mix)
    slopes = [
        slope + coef * (math.exp(lq) - (j == token))
        for j, (slope, lq) in enumerate(zip(slopes, student, strict=True))
    ]
    return x - coef * student[token], slopes
