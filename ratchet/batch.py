"""Define the packed form of a list of groups, in which all tokens lie end to end without padding.

T = all tokens, S = sequences (trajectories), G = groups, M = masks of B bytes. Groups are
contiguous and in order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ratchet.errors import MissingColumn
from ratchet.types import PlacedMedium
from ratchet.utils.transfer import upload_together

Level = Literal["token", "sequence", "group"]
# The token column of expert choices, int16 [T, layers with experts, experts of a token]. It exists
# if the sampler recorded them.
ROUTES = "routes"
# The token column of rows of `Batch.masks_MB`, int32 [T], -1 where every token was allowed. It
# exists if a grammar constrained a token.
ALLOWED = "allowed"
# Token columns, bool [T], True at all tokens of a turn with a malformed tool call, or with
# malformed thinking. They exist if there is such a turn.
MALFORMED_CALLS, MALFORMED_THINKING = "malformed_calls", "malformed_thinking"


class LossWeights(NamedTuple):
    """The weights of one loss term in one optimizer step. They include the normaliser."""

    level: Level
    values: Tensor  # float64, [T], [S] or [G] by `level`
    # Sum of `values` over the whole optimizer step; the micro-batches of the step have the same
    # total. Sums of weighted metrics are divided by it, which makes them means.
    total: float = 1.0
    coef: float = 1.0  # factor on the term in this step


@dataclass(frozen=True, slots=True)
class Batch:
    """A packed list of groups, as columns of tokens, sequences and groups.

    Columns that `pack` fills are fields. Columns that passes and estimators fill later are in
    `token_columns` ([T] or [T, k]) and `sequence_columns` ([S]). Statistics (rewards, advantages,
    weights) are float64 on the CPU. The learner casts them to its own dtype, so that the same batch
    serves float32 training and float64 oracles.
    """

    tokens_T: Tensor  # int64
    positions_T: Tensor  # int64, restarts at 0 in every sequence
    turn_T: Tensor  # int32, index of the policy turn, -1 outside
    # float64, the turn's own reward at its last token, NaN elsewhere
    turn_rewards_T: Tensor
    # int64, number of the pair (group, `Turn.state_key`) of the policy turn, -1 elsewhere
    state_T: Tensor
    # bool, the final mask (loss mask): False in rows with use != "train", and in rows and tokens
    # that a filter or a rollout correction removed
    trainable_T: Tensor
    # bool, the tokens that scoring passes score: trainable tokens of "train" and "reference" rows
    predicted_T: Tensor
    rollout_logprobs_T: Tensor  # float32
    log_kept_mass_T: Tensor  # float32, log of the probability mass that top-p, top-k, min-p kept
    versions_T: Tensor  # int32, -1 where the policy did not write
    lengths_S: Tensor  # int64
    group_S: Tensor  # int64, 0..G-1
    attempt_S: Tensor  # int64
    train_S: Tensor  # bool, use == "train" and not removed by a filter
    baseline_S: Tensor  # bool, use == "baseline"
    reference_S: Tensor  # bool, use == "reference"
    scored_S: Tensor  # bool, has a reward that counts
    truncated_S: Tensor  # bool, a token or turn limit ended the attempt
    cut_S: Tensor  # bool, a token limit cut off the last answer
    rewards_S: Tensor  # float64, NaN where there is none
    temperature_S: Tensor  # float64
    tag_S: Tensor  # int64, index into `tags`
    group_ids: tuple[str, ...]  # [G]
    tags: tuple[str, ...]
    media_S: tuple[tuple[PlacedMedium, ...], ...] = ()  # [S]; (): no sequence has media
    token_columns: Mapping[str, Tensor] = field(default_factory=dict)
    sequence_columns: Mapping[str, Tensor] = field(default_factory=dict)
    weights: Mapping[str, LossWeights] = field(default_factory=dict)  # by term name
    metrics: Mapping[str, float] = field(default_factory=dict)  # see `with_metrics`
    # uint8, the distinct masks of `AllowedTokens`; None: no grammar constrained a token
    masks_MB: Tensor | None = None
    # The same batch in main memory, if this one is on an accelerator.
    host: Batch | None = None

    @property
    def on_host(self) -> Batch:
        """Return the batch in main memory, whose values can be read without waiting."""
        return self.host or self

    @property
    def n_tokens(self) -> int:
        return len(self.tokens_T)

    @property
    def n_sequences(self) -> int:
        return len(self.lengths_S)

    @property
    def n_groups(self) -> int:
        return len(self.group_ids)

    @property
    def starts_S(self) -> Tensor:
        """Return the index of each sequence's first token in the flat [T] axis."""
        return self.lengths_S.cumsum(0) - self.lengths_S

    @property
    def sequence_T(self) -> Tensor:
        """Return the index of the sequence that each token belongs to, int64 [T]."""
        return torch.repeat_interleave(
            torch.arange(self.n_sequences, device=self.lengths_S.device),
            self.lengths_S,
            output_size=self.n_tokens,
        )

    def need(self, name: str, *, algorithm: str = "") -> Tensor:
        """Return the filled column `name`.

        Raises MissingColumn, which names the algorithm, the column and the pass to add.
        """
        for columns in (self.token_columns, self.sequence_columns):
            if name in columns:
                return columns[name]
        raise MissingColumn(name, algorithm=algorithm)

    def has(self, name: str) -> bool:
        return name in self.token_columns or name in self.sequence_columns

    def fill_tokens(self, **columns: Tensor) -> Batch:
        for name, column in columns.items():
            assert len(column) == self.n_tokens, (
                f"{name}: {len(column)} rows for {self.n_tokens} tokens"
            )
        return replace(self, token_columns={**self.token_columns, **columns})

    def fill_sequences(self, **columns: Tensor) -> Batch:
        for name, column in columns.items():
            assert len(column) == self.n_sequences, (
                f"{name}: {len(column)} rows for {self.n_sequences} sequences"
            )
        return replace(self, sequence_columns={**self.sequence_columns, **columns})

    def with_metrics(self, **metrics: float) -> Batch:
        """Return the batch with further metrics, such as those of a function that fills columns."""
        return replace(self, metrics={**self.metrics, **metrics})

    def sequence_sum(self, x_T: Tensor) -> Tensor:
        """Sum a token column within each sequence: [T] -> [S], differentiable."""
        return x_T.new_zeros(self.n_sequences).index_add(0, self.sequence_T, x_T)

    def group_sum(self, x_S: Tensor) -> Tensor:
        """Sum a sequence column within each group: [S] -> [G], differentiable."""
        return x_S.new_zeros(self.n_groups).index_add(0, self.group_S, x_S)

    def take(self, sequences: Sequence[int]) -> Batch:
        """Return a mini-batch, micro-batch or shard: the given sequences in the given order.

        Weights stay with their rows and are not renormalised. Groups are renumbered from 0 in order
        of appearance. If a weight is at group level, each group must be taken whole
        (`plan_microbatches` with unit="group" never splits one).
        """
        return next(self.split([sequences]))

    def split(self, plan: Iterable[Sequence[int]]) -> Iterator[Batch]:
        """Yield `take(sequences)` for each list of sequences in a plan, such as of micro-batches.

        The time for each list is proportional to its tokens, not to those of the whole batch.
        """
        starts_S = self.starts_S
        return (self._select(sequences, starts_S) for sequences in plan)

    def _select(self, sequences: Sequence[int], starts_S: Tensor) -> Batch:
        rows = torch.as_tensor(sequences, dtype=torch.int64, device=self.lengths_S.device)
        lengths_S = self.lengths_S[rows]
        offsets_S = starts_S[rows] - (lengths_S.cumsum(0) - lengths_S)
        total = int(lengths_S.sum())
        token_indices = torch.arange(total, device=rows.device) + torch.repeat_interleave(
            offsets_S, lengths_S, output_size=total
        )
        group_indices, group_S = _renumber(self.group_S[rows])
        indices_by_level = {"token": token_indices, "sequence": rows, "group": group_indices}
        changes: dict[str, object] = {}
        for column in fields(self):
            value = getattr(self, column.name)
            if isinstance(value, Tensor) and column.name != "masks_MB":
                changes[column.name] = value[token_indices if column.name.endswith("_T") else rows]
        changes["media_S"] = tuple(self.media_S[i] for i in rows.tolist()) if self.media_S else ()
        changes["group_S"] = group_S
        changes["host"] = None
        changes["group_ids"] = tuple(self.group_ids[g] for g in group_indices.tolist())
        changes["token_columns"] = {k: v[token_indices] for k, v in self.token_columns.items()}
        changes["sequence_columns"] = {k: v[rows] for k, v in self.sequence_columns.items()}
        changes["weights"] = {
            k: w._replace(values=w.values[indices_by_level[w.level]])
            for k, w in self.weights.items()
        }
        selected = replace(self, **changes)  # pyright: ignore[reportArgumentType]
        return selected if selected.masks_MB is None else selected._without_unused_masks()

    def _without_unused_masks(self) -> Batch:
        """Return the batch with only those masks that its tokens refer to."""
        assert self.masks_MB is not None
        used, index_T = torch.unique(self.need(ALLOWED), return_inverse=True)
        n_unconstrained = int((used < 0).sum())  # 0 or 1: the smallest value is -1
        return replace(
            self.fill_tokens(**{ALLOWED: (index_T - n_unconstrained).to(torch.int32)}),
            masks_MB=self.masks_MB[used[n_unconstrained:].long()],
        )

    def to(self, device: torch.device | str, dtype: torch.dtype) -> Batch:
        """Return the batch on `device`, floats cast to `dtype` (the learner's loss dtype)."""

        columns = {
            item.name: getattr(self, item.name)
            for item in fields(self)
            if isinstance(getattr(self, item.name), Tensor)
        }
        weights = {name: weight.values for name, weight in self.weights.items()}
        groups = (columns, self.token_columns, self.sequence_columns, weights)
        moved = iter(
            upload_together(
                [
                    x.to(dtype=dtype) if x.is_floating_point() else x
                    for group in groups
                    for x in group.values()
                ],
                device,
            )
        )
        columns, token_columns, sequence_columns, weights = (
            {name: next(moved) for name in group} for group in groups
        )
        changes: dict[str, object] = {
            **columns,
            "token_columns": token_columns,
            "sequence_columns": sequence_columns,
            "weights": {k: w._replace(values=weights[k]) for k, w in self.weights.items()},
            "host": None if torch.device(device).type == "cpu" else self.on_host,
        }
        return replace(self, **changes)  # pyright: ignore[reportArgumentType]


def _renumber(group_S: Tensor) -> tuple[Tensor, Tensor]:
    """Return (old ids in order of appearance, new ids 0..G-1 per sequence)."""
    new_id_by_old: dict[int, int] = {}
    new_ids = [new_id_by_old.setdefault(g, len(new_id_by_old)) for g in group_S.tolist()]
    device = group_S.device
    return torch.tensor(list(new_id_by_old), dtype=torch.int64, device=device), torch.tensor(
        new_ids, dtype=torch.int64, device=device
    )
