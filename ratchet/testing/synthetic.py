"""Synthetic batches and models for the tests of algorithms.

They are small, ragged, full of edge cases, and exact (float64).

T = tokens laid end to end, n = some of these tokens, V = vocabulary, d = hidden size.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ratchet.algorithms.base import Algorithm
from ratchet.batch import Batch
from ratchet.learners.compute.token_outputs import (
    Head,
    TokenOutputSpec,
    compute_state_values,
    compute_token_columns,
    select_sequence_scores,
)
from ratchet.models.layers.expert_routing import LayerRouting, RouterMonitor
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
    Use,
)

VOCAB, HIDDEN = 11, 5
# Few values, so that rewards are often equal; most are not exact in binary.
REWARDS = (0.0, 1.0, -1.0, 0.1, 0.3, 0.7, 2.5)
PREDICTIONS = frozenset({"logprobs", "entropy", "topk_logprobs", "topk_ids"})


class TinyRole:
    """A model that predicts from a token and the one before it, with a scalar head.

    It scores like a learner, and computes the columns that loss terms read. The outputs of a row
    depend on that row alone.
    """

    def __init__(self, name: str, *, drift: float = 0.0) -> None:
        """Create the model; equal names and drifts give equal models.

        Args:
            name: Name of the model, which seeds its weights and their change.
            drift: Scale of a random change of the weights.
        """
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))

        def normal(*shape: int) -> Tensor:
            start, change = torch.randn(2, *shape, generator=generator, dtype=torch.float64)
            return start + drift * change

        self.embedding_Vd = normal(VOCAB, HIDDEN)
        self.head_Vd = normal(VOCAB, HIDDEN) / 2
        self.scalar_d = normal(HIDDEN)

    async def score(
        self, batch: Batch, output_names: Sequence[str], *, top_k: int = 0
    ) -> Mapping[str, Tensor]:
        columns = self._columns(
            batch,
            batch.predicted_T,
            output_names,
            TokenOutputSpec.from_names(output_names, top_k=top_k),
        )
        if "spans" in output_names:
            # Every two tokens of a row form a span.
            pairs_T = batch.starts_S[batch.sequence_T] + batch.positions_T // 2
            columns["spans"] = torch.where(batch.predicted_T, pairs_T, -1)
        return {name: columns[name] for name in output_names}

    def outputs(self, batch: Batch, needs: Collection[str]) -> dict[str, Tensor]:
        """Return the contents of `Outputs` for an update, without the old logprobs."""
        column_names = {"logprobs"} | set(needs) if "old_logprobs" in needs else set(needs)
        columns = self._columns(
            batch,
            batch.predicted_T,
            column_names,
            TokenOutputSpec.from_names(needs, has_ids=batch.has("teacher_ids")),
        )
        return {name: column for name, column in columns.items() if name in column_names}

    def _columns(
        self, batch: Batch, mask_T: Tensor, names: Collection[str], spec: TokenOutputSpec
    ) -> dict[str, Tensor]:
        previous_Td = self.embedding_Vd[batch.tokens_T.roll(1)] * (batch.positions_T > 0)[:, None]
        hidden_Td = torch.tanh(self.embedding_Vd[batch.tokens_T] + previous_Td / 2)
        columns: dict[str, Tensor] = {}
        if not PREDICTIONS.isdisjoint(names):
            head = Head(self._logits, len(self.head_Vd), chunk_rows=1 << 30)
            columns |= compute_token_columns(head, hidden_Td, batch, mask_T, spec)
        scalars_T = hidden_Td @ self.scalar_d
        columns |= {
            "values": compute_state_values(scalars_T, mask_T),
            "scores": select_sequence_scores(scalars_T, batch),
        }
        if "routers" in names:  # one layer, with an expert for each token of the vocabulary
            logits_TV = self._logits(hidden_Td)
            chosen_T2 = logits_TV.topk(2).indices
            monitor = RouterMonitor()
            monitor.layers[0] = LayerRouting(logits_TV, chosen_T2, chosen_T2)
            columns["routers"] = monitor.measure(batch.sequence_T, batch.n_sequences)
        return {**columns, "token_scores": scalars_T}

    def _logits(self, hidden_nd: Tensor) -> Tensor:
        return hidden_nd @ self.head_Vd.T


def list_part_names(algorithm: Algorithm) -> tuple[str, ...]:
    """Return names for the parts of rewards.

    They are the keys of the algorithm's options called `weights`, or two fixed names if the
    algorithm has no such option.
    """

    def collect_names(value: Any) -> set[str]:
        if isinstance(value, functools.partial):
            weights = value.keywords.get("weights")
            weight_names = set(weights) if isinstance(weights, Mapping) else set[str]()
            return weight_names.union(
                *(collect_names(item) for item in (*value.args, *value.keywords.values()))
            )
        if isinstance(value, tuple | list):
            return set[str]().union(*(collect_names(item) for item in value))
        return set()

    return tuple(sorted(collect_names(algorithm.advantage))) or ("correct", "brief")


@dataclass(frozen=True)
class Draw:
    """A random draw of groups."""

    seed: int
    has_equal_rewards: bool = False
    """True if rewards are equal within each group, part by part."""
    attempts: int | None = None
    """Number of attempts in each group; None: the algorithm's group size."""
    longest: int = 0
    """Number of tokens of the longest answer of each group; 0: all answers have a few tokens."""

    def groups(self, algorithm: Algorithm) -> list[Group]:
        rng = np.random.default_rng(self.seed)
        make_rows = {
            "rollouts": _make_attempts,
            "pairs": _make_pair,
            "labelled": _make_labelled,
            "steps": _make_labelled_steps,
        }.get(algorithm.source, _make_row)
        tags = sorted({item.tag for item in algorithm.passes if item.tag is not None}) or [
            "",
            "other",
        ]
        groups = []
        for index in range(3 if self.longest else 5):
            name = f"draw-{self.seed}-group-{index}"
            task = Task(name, (Message("user", "?"),), tag=tags[index % len(tags)])
            rows = make_rows(rng, self, algorithm, index)
            groups.append(Group(name, task, tuple(rows)))
        return groups


def _make_attempts(
    rng: np.random.Generator, draw: Draw, algorithm: Algorithm, index: int
) -> list[Trajectory]:
    """Return a group of attempts.

    In the second group all rewards are equal. In the third all attempts failed, unless `draw` sets
    `has_equal_rewards` or `attempts`.
    """
    n_attempts = draw.attempts or algorithm.group_size
    names = list_part_names(algorithm)
    must_have_reward = draw.has_equal_rewards or draw.attempts is not None
    equal_reward = _draw_rewards(rng, names)
    rows: list[Trajectory] = []
    for attempt in range(n_attempts):
        reward = equal_reward if draw.has_equal_rewards or index == 1 else _draw_rewards(rng, names)
        outcome = (
            Failed("kit")
            if index == 2 and not must_have_reward
            else _draw_outcome(rng, reward, must_have_reward=must_have_reward)
        )
        n_trajectories = 2 if rng.random() < 0.15 else 1
        rows += [
            _make_trajectory(rng, outcome, attempt=attempt, longest=draw.longest * (attempt == 0))
            for _ in range(n_trajectories)
        ]
    if algorithm.greedy_baseline:
        outcome = (
            Failed("kit")
            if index == 3 and not must_have_reward
            else Scored(*_draw_rewards(rng, names))
        )
        rows.append(
            _make_trajectory(rng, outcome, attempt=n_attempts, use="baseline", temperature=0.0)
        )
    return rows


def _draw_rewards(rng: np.random.Generator, names: Sequence[str]) -> tuple[float, dict[str, float]]:
    return float(rng.choice(REWARDS)), {name: float(rng.choice(REWARDS)) for name in names}


def _draw_outcome(
    rng: np.random.Generator, reward: tuple[float, dict[str, float]], *, must_have_reward: bool
) -> Outcome:
    """Return a random outcome; if `must_have_reward`, one that has the reward."""
    probability = rng.random()
    if probability < 0.65:
        return Scored(*reward)
    if probability < 0.8 or must_have_reward:
        return Truncated(*reward)
    return [Truncated(None), Failed("kit"), Cancelled("kit")][int(rng.integers(3))]


def _make_trajectory(
    rng: np.random.Generator,
    outcome: Outcome | None,
    *,
    attempt: int = 0,
    use: Use = "train",
    temperature: float | None = None,
    longest: int = 0,
    has_turn_rewards: bool = True,
) -> Trajectory:
    """Return a prompt with up to three turns and the environment's answers after them.

    Some turns have no token, and some of the policy's tokens don't train. There are few states, so
    that attempts share them.
    """
    owner = [Owner.PROMPT] * int(rng.integers(1, 4))
    turns: list[Turn] = []
    for _ in range(1 if longest else int(rng.integers(0, 4))):
        start = len(owner)
        owner += [Owner.POLICY] * (longest or int(rng.integers(0, 5)))
        reward = float(rng.choice(REWARDS)) if has_turn_rewards and rng.random() < 0.3 else None
        turns.append(
            Turn(start, len(owner), reward, state_key=str(rng.choice(["", "here", "there"])))
        )
        owner += [Owner.ENVIRONMENT] * int(rng.integers(0, 3))
    is_policy = np.asarray([token_owner == Owner.POLICY for token_owner in owner])
    return Trajectory(
        tokens=rng.integers(0, VOCAB, len(owner)),
        owner=np.asarray(owner, dtype=np.int8),
        trainable=is_policy & (rng.random(len(owner)) < 0.9),
        rollout_logprobs=np.zeros(len(owner), dtype=np.float32),
        versions=np.where(is_policy, 0, -1).astype(np.int32),
        log_kept_mass=np.where(is_policy, -0.1 * rng.random(len(owner)), 0.0).astype(np.float32),
        attempt=attempt,
        use=use,
        temperature=float(rng.choice([0.7, 1.0])) if temperature is None else temperature,
        turns=tuple(turns),
        outcome=outcome,
    )


def _make_supervised_row(
    rng: np.random.Generator, algorithm: Algorithm, outcome: Outcome | None = None, **options: Any
) -> Trajectory:
    """Return a supervised row, which has no turns.

    Its trainable tokens count as the policy's, although none was sampled.
    """
    row = _make_trajectory(rng, outcome, temperature=algorithm.temperature, **options)
    text = Trajectory.supervised(
        row.tokens.tolist(), row.trainable.tolist(), temperature=row.temperature, outcome=outcome
    )
    return replace(text, attempt=row.attempt, use=row.use)


def _make_pair(
    rng: np.random.Generator, draw: Draw, algorithm: Algorithm, index: int
) -> list[Trajectory]:
    better, worse = sorted(rng.choice(REWARDS, 2).tolist(), reverse=True)
    rewards = [better, better if draw.has_equal_rewards else worse][: draw.attempts]
    return [
        _make_supervised_row(rng, algorithm, Scored(reward), attempt=attempt)
        for attempt, reward in enumerate(rewards)
    ]


def _make_labelled(
    rng: np.random.Generator, draw: Draw, algorithm: Algorithm, index: int
) -> list[Trajectory]:
    rows = [_make_supervised_row(rng, algorithm, Scored(float(rng.choice(REWARDS))))]
    return (
        [*rows, _make_supervised_row(rng, algorithm, attempt=1, use="reference")]
        if algorithm.uses_mismatched_pairs
        else rows
    )


def _make_row(
    rng: np.random.Generator, draw: Draw, algorithm: Algorithm, index: int
) -> list[Trajectory]:
    return [_make_supervised_row(rng, algorithm)]


def _make_labelled_steps(
    rng: np.random.Generator, draw: Draw, algorithm: Algorithm, index: int
) -> list[Trajectory]:
    """Return a row whose turns are labelled steps; some have no label."""
    row = _make_trajectory(rng, None, temperature=algorithm.temperature, has_turn_rewards=False)
    turns = [
        replace(turn, reward=None if i == 2 else float(rng.choice([0.0, 1.0, 0.4])))
        for i, turn in enumerate(row.turns)
    ]
    return [replace(row, turns=tuple(turns))]
