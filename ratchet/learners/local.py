"""The learner of one process: autograd on packed micro-batches, AdamW, and nothing but sums in between.

T = tokens, S = sequences of a micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from ratchet.batch import Batch, Level
from ratchet.checkpoint.state import load_state, save_state
from ratchet.config.schema import OptimizerConfig
from ratchet.crew import Crew, dealt
from ratchet.errors import TrainingError
from ratchet.interfaces import LossTerm, Shard
from ratchet.learners.columns import Wanted
from ratchet.learners.config import LocalConfig
from ratchet.learners.forward import Forward
from ratchet.learners.optimizer import AdamW
from ratchet.learners.plan import plan_microbatches
from ratchet.learners.schedule import lr_factor
from ratchet.models.heads import ScalarHead, save_head
from ratchet.models.policy import PolicyModel

MAX_MICRO_BATCH_TOKENS = 2304  # "auto" on a CPU: larger ones gain nothing there, and take more memory
MAX_MICRO_BATCH_TOKENS_GPU = 16384
CHUNK_MIB, CHUNK_MIB_GPU = 16, 256  # "auto": a CPU's cache is small, an accelerator wants large products


class LocalLearner:
    """Implements `Learner` for a `PolicyModel` in this process.

    model: holds float32 (master) weights; on an accelerator the forward runs under bfloat16 autocast when `autocast`.
    optimizer: None makes a frozen role (a reference), which can only score. total_steps: optimizer steps of the schedule.
    head: the scalar head that "values" and "scores" read. unit: what a micro-batch never splits. shared_vocab: how many tokens,
    the first ones, it has in common with models that it is compared with token by token ("topk_logprobs"); None: all.
    """

    def __init__(
        self,
        config: LocalConfig,
        model: PolicyModel,
        *,
        optimizer: OptimizerConfig | None = None,
        total_steps: int = 1,
        unit: Level = "sequence",
        head: ScalarHead | None = None,
        autocast: bool = False,
        shared_vocab: int | None = None,
    ) -> None:
        self.model, self.config, self.head = model, config, head
        self.unit: Level = unit
        model.checkpointing = config.activation_checkpointing
        on_cpu = next(model.parameters()).device.type == "cpu"
        chunk_mib = config.logprob_chunk_mib
        if chunk_mib == "auto":
            chunk_mib = CHUNK_MIB if on_cpu else CHUNK_MIB_GPU
        own = Forward(model, head, chunk_mib=chunk_mib, autocast=autocast, shared_vocab=shared_vocab)
        self.device, self.dtype = own.device, own.dtype
        # "auto" is a number in a run, which has measured it; an accelerator does one thing at a time.
        self.crew = Crew(1 if config.workers == "auto" or not on_cpu else config.workers)
        # The first one's gradients are those that the optimizer reads.
        self.hands = [own, *(own.twin() for _ in range(self.crew.size - 1))] if optimizer else [own] * self.crew.size
        self.schedule, self.total_steps = optimizer, total_steps
        self.optimizer = None if optimizer is None else AdamW(own.parameters(), optimizer)
        self.steps_taken = 0  # counts optimizer steps, skipped ones included: the schedule is a function of it
        self.bad_steps = 0  # non-finite ones in a row

    # --- scoring

    async def score(self, batch: Batch, wanted: Sequence[str], *, top_k: int = 0) -> Mapping[str, Tensor]:
        columns: dict[str, Tensor] = {}
        starts, lengths = batch.starts_S.tolist(), batch.lengths_S.tolist()
        plan = self._plan(batch) or [[]]  # an empty batch has columns too, of the right width
        for rows, found in zip(plan, self._scored(batch, plan, wanted, top_k), strict=True):
            spans = [torch.arange(starts[row], starts[row] + lengths[row]) for row in rows]
            tokens = torch.cat(spans) if spans else slice(0)
            for name in wanted:
                part = found[name].to("cpu")
                size = batch.n_sequences if name == "scores" else batch.n_tokens
                column = columns.setdefault(name, part.new_zeros(size, *part.shape[1:]))
                column[rows if name == "scores" else tokens] = part
        return columns

    def _scored(self, batch: Batch, plan: Sequence[list[int]], wanted: Sequence[str], top_k: int) -> list[Mapping[str, Tensor]]:
        def score(hand: Forward, rows: list[int]) -> Mapping[str, Tensor]:
            asked = Wanted.among(wanted, top_k=top_k, shared=hand.shared_vocab)
            with torch.no_grad():
                return hand.columns(batch.take(rows).to(self.device, self.dtype), wanted, asked)

        return self._shared_out(batch, plan, score)

    # --- updating

    async def update(self, mini: Batch, terms: Sequence[LossTerm]) -> Mapping[str, float]:
        optimizer, schedule = self.optimizer, self.schedule
        assert optimizer is not None, "a frozen role was asked to update"
        assert schedule is not None
        factor = lr_factor(
            self.steps_taken,
            total=self.total_steps,
            warmup=schedule.warmup_steps,
            schedule=schedule.schedule,
            min_ratio=schedule.min_lr_ratio,
        )
        self.steps_taken += 1
        metrics: dict[str, float] = {"lr": schedule.lr * factor, "skipped_empty": 0.0, "skipped_nonfinite": 0.0}
        active = weighing_rows(mini, terms)
        if not active:
            return {**metrics, "skipped_empty": 1.0}
        sums = self._accumulate(mini if len(active) == mini.n_sequences else mini.take(active), terms)
        parameters = [parameter for _, parameter in self.hands[0].parameters()]
        norm = float(nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]))
        metrics |= {name: float(value) for name, value in sums.items()} | {"grad_norm": norm}
        if not (math.isfinite(norm) and math.isfinite(metrics["loss"])):
            optimizer.zero_grad()
            self._count_bad_step(norm, metrics["loss"])
            return {**metrics, "skipped_nonfinite": 1.0}
        self.bad_steps = 0
        if schedule.max_grad_norm is not None:
            nn.utils.clip_grads_with_norm_(parameters, schedule.max_grad_norm, torch.tensor(norm))
        optimizer.step(metrics["lr"])
        optimizer.zero_grad()
        return metrics

    def _accumulate(self, mini: Batch, terms: Sequence[LossTerm]) -> dict[str, Tensor]:
        """Sums of losses and metrics over all micro-batches; gradients add up in `.grad`. The same sums in the same order,
        whoever is faster: a run can be repeated."""
        sums: dict[str, Tensor] = {}
        for found in self._shared_out(mini, self._plan(mini), lambda hand, rows: hand.learn(mini.take(rows), terms)):
            for key, value in found.items():
                sums[key] = sums.get(key, 0.0) + value
        for hand in self.hands[1:]:
            _hand_over(hand, self.hands[0])
        return sums

    def _shared_out(
        self, batch: Batch, plan: Sequence[list[int]], work: Callable[[Forward, list[int]], Mapping[str, Tensor]]
    ) -> list[Mapping[str, Tensor]]:
        """What comes of each micro-batch, in order."""
        lengths = batch.lengths_S.tolist()
        shares = dealt([sum(lengths[row] for row in rows) for rows in plan], self.crew.size)

        def some(hand: Forward, share: list[int]) -> list[Mapping[str, Tensor]]:
            return [work(hand, plan[i]) for i in share]

        done = self.crew.run([partial(some, hand, share) for hand, share in zip(self.hands, shares, strict=True)])
        found = {i: part for share, parts in zip(shares, done, strict=True) for i, part in zip(share, parts, strict=True)}
        return [found[i] for i in range(len(plan))]

    def _count_bad_step(self, norm: float, loss: float) -> None:
        self.bad_steps += 1
        if self.bad_steps >= self.config.max_bad_steps:
            raise TrainingError(
                f"{self.bad_steps} optimizer steps in a row were not finite (loss {loss}, gradient norm {norm}); weights are "
                "those before them: lower optimizer.lr"
            )

    def _plan(self, batch: Batch) -> list[list[int]]:
        limit = self.config.micro_batch_tokens
        if limit == "auto":
            limit = MAX_MICRO_BATCH_TOKENS if self.device.type == "cpu" else MAX_MICRO_BATCH_TOKENS_GPU
        shares = self.model.shares_prefixes
        return plan_microbatches(batch, max_tokens=int(limit), unit=self.unit, shares=shares, hands=self.crew.size)

    # --- weights and state

    def weights(self) -> Iterator[Shard]:
        for name, tensor in self.model.canonical_weights():
            yield Shard(name, tuple(tensor.shape), (0,) * tensor.dim(), tensor.detach())

    def save(self, directory: Path) -> None:
        state: dict[str, object] = {"steps_taken": self.steps_taken, "bad_steps": self.bad_steps}
        state["parameters"] = {name: parameter.detach() for name, parameter in self.hands[0].parameters()}
        if self.optimizer is not None:
            state["optimizer"] = self.optimizer.state
        save_state(directory, state)

    def export(self, directory: Path) -> None:
        self.model.save(directory)
        if self.head is not None:
            save_head(self.head, directory)

    def load(self, directory: Path) -> None:
        state = load_state(directory)
        self.steps_taken, self.bad_steps = state["steps_taken"], state["bad_steps"]
        with torch.no_grad():
            for name, parameter in self.hands[0].parameters():
                parameter.copy_(state["parameters"][name])
        if self.optimizer is not None:
            self.optimizer.load(state["optimizer"])


def weighing_rows(batch: Batch, terms: Sequence[LossTerm]) -> list[int]:
    """The sequences that weigh anything in any term: the others add nothing to losses, gradients or metrics."""
    counts_S = torch.zeros(batch.n_sequences, dtype=torch.bool)
    for term in terms:
        level, values, *_ = batch.weights[term.name]
        active = values != 0
        if level == "token":
            active = batch.sequence_sum(active.double()) > 0
        counts_S |= active[batch.group_S] if level == "group" else active
    return counts_S.nonzero()[:, 0].tolist()


def _hand_over(source: Forward, target: Forward) -> None:
    """Adds one's gradients to the other's, and leaves none."""
    for (_, given), (_, kept) in zip(source.parameters(), target.parameters(), strict=True):
        if given.grad is not None:
            kept.grad = given.grad if kept.grad is None else kept.grad.add_(given.grad)
            given.grad = None
