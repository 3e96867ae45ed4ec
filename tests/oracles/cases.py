"""Random ragged batches (hypothesis), and the same rows as the product's groups."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import torch
from hypothesis import strategies as st
from oracles.ragged import Ragged, Row, Span, flat, in_order
from torch import Tensor

from ratchet.batch import Batch
from ratchet.data.packing import pack
from ratchet.protocols import Outputs
from ratchet.types import (
    Cancelled,
    Failed,
    Group,
    Message,
    Outcome,
    Owner,
    Scored,
    Task,
    Trajectory,
    Truncated,
    Turn,
)

VOCAB = 5
# Rewards collide often (equal rewards must give exactly 0), and some are not dyadic (0.1 + 0.1 +
# 0.1 != 0.3).
REWARDS = st.sampled_from([0.0, 1.0, -1.0, 0.1, 0.3, 0.7, 2.5])
LOGPROBS = st.floats(-4.0, -0.01)
# live - old: inside the clip range, outside, and exactly on-policy
SHIFTS = st.one_of(st.just(0.0), st.floats(-1.5, 1.5))


@st.composite
def _endings(draw: st.DrawFn) -> tuple[str, float | None]:
    ending = draw(
        st.sampled_from([*["scored"] * 4, "truncated", "unjudged", "failed", "cancelled"])
    )
    if ending == "scored":
        return ending, draw(REWARDS)
    return ending, draw(st.none() | REWARDS) if ending == "truncated" else None


@st.composite
def _masks(draw: st.DrawFn) -> list[bool]:
    """A prompt, then turns: policy spans that train, with environment spans between them. Possibly
    no trained token."""
    spans = [[False] * draw(st.integers(1, 2))]
    for trains in draw(st.lists(st.booleans(), max_size=3)):
        spans.append([trains] * draw(st.integers(1, 3)))
    return [m for span in spans for m in span]


@st.composite
def _row(
    draw: st.DrawFn, group: str, attempt: int, ending: str, reward: float | None, use: str
) -> Row:
    trained = draw(_masks())
    n = len(trained)
    row = Row(
        group,
        attempt,
        draw(st.lists(st.integers(0, VOCAB - 1), min_size=n, max_size=n)),
        trained,
        ending,
        reward,
        use,
    )
    live = [draw(LOGPROBS) if m else 0.0 for m in row.mask]
    old = [lp - draw(SHIFTS) if m else 0.0 for m, lp in zip(row.mask, live, strict=True)]
    entropy = [draw(st.floats(0.0, 1.6)) if m else 0.0 for m in row.mask]
    return replace(row, logprobs=live, old_logprobs=old, entropy=entropy)


@st.composite
def rollouts(draw: st.DrawFn, max_groups: int = 4) -> list[Row]:
    """Groups of 1 to 4 attempts of 1 to 2 rows each, in any state that an attempt can end in; some
    are baselines."""
    rows: list[Row] = []
    for g in range(draw(st.integers(1, max_groups))):
        for attempt in draw(st.lists(st.integers(0, 9), min_size=1, max_size=4, unique=True)):
            ending, reward = draw(_endings())
            use = draw(st.sampled_from(["train"] * 5 + ["baseline"]))
            for _ in range(draw(st.sampled_from([1, 1, 1, 2]))):
                rows.append(draw(_row(f"g{g}", attempt, ending, reward, use)))
    return rows


@st.composite
def supervised(draw: st.DrawFn) -> list[Row]:
    """Rows of given text: groups of one, nothing judged."""
    uses = draw(
        st.lists(st.sampled_from(["train", "train", "train", "reference"]), min_size=1, max_size=6)
    )
    return [draw(_row(f"g{g}", 0, "unjudged", None, use)) for g, use in enumerate(uses)]


@st.composite
def _turns(draw: st.DrawFn) -> tuple[list[Span], list[bool]]:
    """A prompt, then up to three turns with or without an environment's answer between them; some
    turns are masked, as a whole or at their start. Few states, so that attempts meet in them."""
    spans: list[Span] = []
    trained = [False] * draw(st.integers(1, 2))
    for masked in draw(st.lists(st.sampled_from(["no", "no", "no", "start", "whole"]), max_size=3)):
        length = draw(st.integers(1, 3))
        reward = draw(st.none() | REWARDS) if masked != "whole" else None
        spans.append(
            Span(
                len(trained),
                len(trained) + length,
                reward,
                draw(st.sampled_from(["", "a", "a", "b"])),
            )
        )
        trained += [masked == "no" or (masked == "start" and i > 0) for i in range(length)]
        trained += [False] * draw(st.integers(0, 2))
    # a turn whose only token is masked can't carry a reward to any step
    spans = [s if any(trained[s.start : s.end]) else replace(s, reward=None) for s in spans]
    return spans, trained


def _noise(row: Row, numbers: random.Random) -> Row:
    """Numbers in every column, also where nobody may read them; token rewards and logprobs only
    where the row trains."""
    n, mask = len(row.tokens), row.mask

    def anywhere() -> list[float]:
        return [numbers.uniform(-2, 2) for _ in range(n)]

    def on_steps(low: float, high: float) -> list[float]:
        return [numbers.uniform(low, high) if trains else 0.0 for trains in mask]

    return replace(
        row,
        values=anywhere(),
        bootstrap=numbers.uniform(-2, 2),
        token_rewards=on_steps(-0.5, 0.5),
        old_logprobs=on_steps(-4, 0),
        ref_logprobs=on_steps(-4, 0),
        teacher_logprobs=on_steps(-4, 0),
        # float32 in the batch: such numbers are the same there
        rollout_logprobs=[
            numbers.randint(-4000, 0) / 1024 if row.trained[t] else 0.0 for t in range(n)
        ],
        log_kept_mass=[
            numbers.choice([0, numbers.randint(-500, 0)]) / 1024 if row.trained[t] else 0.0
            for t in range(n)
        ],
    )


@st.composite
def episodes(draw: st.DrawFn, max_groups: int = 3) -> list[Row]:
    """Like `rollouts`, with turns, states, parts of rewards and all columns; at most one baseline
    attempt a group."""
    numbers = random.Random(draw(st.integers(0, 2**32 - 1)))
    rows: list[Row] = []
    for g in range(draw(st.integers(1, max_groups))):
        attempts = draw(st.lists(st.integers(0, 9), min_size=1, max_size=4, unique=True))
        baseline = draw(st.sampled_from([None, *attempts]))
        for attempt in attempts:
            ending, reward = draw(_endings())
            parts = (
                {}
                if reward is None
                else draw(st.dictionaries(st.sampled_from(["right", "form"]), REWARDS))
            )
            for _ in range(draw(st.sampled_from([1, 1, 1, 2]))):
                turns, trained = draw(_turns())
                use = "baseline" if attempt == baseline else "train"
                row = Row(
                    f"g{g}",
                    attempt,
                    [1] * len(trained),
                    trained,
                    ending,
                    reward,
                    use,
                    parts=parts,
                    turns=turns,
                )
                rows.append(_noise(row, numbers))
    return rows


def outcome(row: Row) -> Outcome | None:
    if row.ending == "unjudged":
        return None
    if row.ending == "scored":
        assert row.reward is not None
        return Scored(row.reward, row.parts)
    if row.ending == "truncated":
        return Truncated(row.reward, row.parts)
    return Failed("sandbox") if row.ending == "failed" else Cancelled("slow")


def trajectory(row: Row) -> Trajectory:
    """The policy wrote what is in a turn; the prompt is what comes before the first, the rest is
    the environment's."""
    trained = np.array(row.trained, dtype=np.bool_)
    owner = np.full(len(row.tokens), Owner.ENVIRONMENT)
    owner[: row.spans[0].start if row.spans else len(row.tokens)] = Owner.PROMPT
    for span in row.spans:
        owner[span.start : span.end] = Owner.POLICY
    wrote = owner == Owner.POLICY
    rollout = np.array(row.rollout_logprobs) if row.rollout_logprobs else np.where(wrote, -1.0, 0.0)
    return Trajectory(
        tokens=np.array(row.tokens, dtype=np.int64),
        owner=owner.astype(np.int8),
        trainable=trained,
        rollout_logprobs=rollout.astype(np.float32),
        versions=np.where(wrote, 0, -1).astype(np.int32),
        log_kept_mass=np.array(row.log_kept_mass, dtype=np.float32) if row.log_kept_mass else None,
        attempt=row.attempt,
        use=row.use,  # pyright: ignore[reportArgumentType]
        turns=tuple(Turn(span.start, span.end, span.reward, span.state) for span in row.spans),
        outcome=outcome(row),
    )


def groups(rows: list[Row]) -> list[Group]:
    """The rows as groups, in order of appearance. Rows of a group must be adjacent, for the packed
    order to be theirs."""
    ids = in_order(rows)
    assert [row.group for row in rows] == sorted((row.group for row in rows), key=ids.index), (
        "groups are not adjacent"
    )
    # equal prompts: groups are told apart by id alone
    task = Task("same prompt", (Message("user", "same prompt"),))
    return [Group(g, task, tuple(trajectory(row) for row in rows if row.group == g)) for g in ids]


def filled(rows: list[Row], *columns: str) -> Batch:
    """The packed rows with some of their own columns: of tokens by the name in `RowLinear`, or
    "bootstrap_values"."""
    batch = pack(groups(rows))
    for name in columns:
        if name == "bootstrap_values":
            batch = batch.fill_sequences(
                **{name: column([[row.bootstrap for row in rows if row.counts]])}
            )
        else:
            batch = batch.fill_tokens(
                **{name: column(kept(rows, [getattr(row, name) for row in rows]))}
            )
    return batch


def kept(rows: list[Row], column: list) -> list:
    """The entries of a column for the rows that are in the batch."""
    return [x for row, x in zip(rows, column, strict=True) if row.counts]


def by_row(batch: Batch, name: str = "advantages") -> list[float]:
    """The mean of a token column over the tokens of each row that train; 0 for a row without."""
    count_S = batch.sequence_sum(batch.trainable_T.double()).clamp(min=1)
    return (
        batch.sequence_sum(torch.where(batch.trainable_T, batch.need(name), 0.0)) / count_S
    ).tolist()


def column(ragged: Ragged) -> Tensor:
    """A ragged column as the packed [T], float64."""
    return torch.tensor(flat(ragged), dtype=torch.float64)


def leaf(ragged: Ragged) -> Tensor:
    return column(ragged).requires_grad_()


def outputs(
    batch: Batch, logprobs: Tensor, rows: list[Row], entropy: Tensor | None = None
) -> Outputs:
    """What a learner would hand to a term: live logprobs, and the rows' own old ones."""
    old = column([row.old_logprobs for row in rows])
    return Outputs(
        sequence_sum=batch.sequence_sum, logprobs=logprobs, old_logprobs=old, entropy=entropy
    )


def gradient(loss: Tensor, of: Tensor) -> Tensor:
    """d loss / d of; zeros where the loss does not depend on it."""
    if not loss.requires_grad:
        return torch.zeros_like(of)
    (found,) = torch.autograd.grad(loss, of, allow_unused=True, retain_graph=True)
    return torch.zeros_like(of) if found is None else found


def bigram(table: Tensor, rows: list[Row]) -> tuple[Tensor, Tensor]:
    """(logprobs [T], entropy [T]) of `categorical.bigram_logprobs`'s model under autograd; 0 where
    a token does not train."""
    log_p = torch.log_softmax(table, dim=-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    zero = table.new_zeros(())
    logprobs, entropies = [], []
    for row in rows:
        for t, trains in enumerate(row.mask):
            before = row.tokens[t - 1]
            logprobs.append(log_p[before, row.tokens[t]] if trains else zero)
            entropies.append(entropy[before] if trains else zero)
    return torch.stack(logprobs), torch.stack(entropies)
