"""One softmax over a few tokens, everything exact by enumeration: probabilities, KL divergences,
entropy, and their gradients by the logits, from the closed forms

    p = softmax(z),     dlog p_v / dz_j = [v = j] - p_j
    d KL(p || q) / dz_j = p_j (log(p_j / q_j) - KL(p || q))
    d KL(q || p) / dz_j = p_j - q_j
    d H(p)       / dz_j = -p_j (log p_j + H(p))

and a bigram model made of them: the logits of the next token are a row of a table, chosen by the
token before.
"""

from __future__ import annotations

import math

from oracles.ragged import Ragged, Row

Table = list[list[float]]  # logits by (token before, token)


def log_softmax(logits: list[float]) -> list[float]:
    top = max(logits)
    norm = top + math.log(math.fsum(math.exp(z - top) for z in logits))
    return [z - norm for z in logits]


def kl(log_p: list[float], log_q: list[float]) -> float:
    return math.fsum(math.exp(p) * (p - q) for p, q in zip(log_p, log_q, strict=True))


def entropy(log_p: list[float]) -> float:
    return -math.fsum(math.exp(p) * p for p in log_p)


def reverse_kl_gradient(log_p: list[float], log_q: list[float]) -> list[float]:
    """d KL(p || q) / dz, p = softmax(z)."""
    divergence = kl(log_p, log_q)
    return [math.exp(p) * (p - q - divergence) for p, q in zip(log_p, log_q, strict=True)]


def forward_kl_gradient(log_p: list[float], log_q: list[float]) -> list[float]:
    """d KL(q || p) / dz, p = softmax(z)."""
    return [math.exp(p) - math.exp(q) for p, q in zip(log_p, log_q, strict=True)]


def entropy_gradient(log_p: list[float]) -> list[float]:
    h = entropy(log_p)
    return [-math.exp(p) * (p + h) for p in log_p]


def bigram_logprobs(table: Table, rows: list[Row]) -> Ragged:
    """log p(token | token before) at every trained token, 0 elsewhere."""
    out = []
    for row in rows:
        logprobs = [0.0] * len(row.tokens)
        for t, trains in enumerate(row.mask):
            if trains:
                logprobs[t] = log_softmax(table[row.tokens[t - 1]])[row.tokens[t]]
        out.append(logprobs)
    return out


def bigram_entropy(table: Table, rows: list[Row]) -> Ragged:
    out = []
    for row in rows:
        masked = enumerate(row.mask)
        out.append(
            [
                entropy(log_softmax(table[row.tokens[t - 1]])) if trains else 0.0
                for t, trains in masked
            ]
        )
    return out


def bigram_gradient(table: Table, rows: list[Row], by_logprob: Ragged) -> Table:
    """d loss / d table by the chain rule, given d loss / d logprob at every token."""
    gradient = [[0.0] * len(logits) for logits in table]
    for row, slopes in zip(rows, by_logprob, strict=True):
        for t, trains in enumerate(row.mask):
            if not trains:
                continue
            before, token = row.tokens[t - 1], row.tokens[t]
            for j, log_p in enumerate(log_softmax(table[before])):
                gradient[before][j] += slopes[t] * ((1.0 if j == token else 0.0) - math.exp(log_p))
    return gradient


def bigram_entropy_gradient(table: Table, rows: list[Row], by_entropy: Ragged) -> Table:
    """d loss / d table, given d loss / d entropy at every token."""
    gradient = [[0.0] * len(logits) for logits in table]
    for row, slopes in zip(rows, by_entropy, strict=True):
        for t, trains in enumerate(row.mask):
            if trains:
                before = row.tokens[t - 1]
                for j, slope in enumerate(entropy_gradient(log_softmax(table[before]))):
                    gradient[before][j] += slopes[t] * slope
    return gradient
