"""Train and score in one process: autograd on packed micro-batches, and an optimizer.

Losses and gradients of micro-batches are summed, not averaged.

T = tokens, S = sequences of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from functools import cached_property, partial
from pathlib import Path

import torch
from torch import Tensor, nn

from ratchet.batch import Batch, Level
from ratchet.checkpoint.serialization import load_state, save_state
from ratchet.config.resolve import build
from ratchet.config.schema import OptimizerConfig
from ratchet.learners.compute.forward import Forward, resolve_chunk_mib
from ratchet.learners.compute.microbatch_dispatch import gather_columns
from ratchet.learners.compute.microbatching import (
    plan_microbatches,
    resolve_micro_batch_tokens,
    select_weighted_rows,
)
from ratchet.learners.config import LocalConfig
from ratchet.learners.offload import Offloader
from ratchet.learners.optim.adamw import AdamW
from ratchet.learners.optim.step_policy import StepPolicy
from ratchet.models.lora.files import check_base, fingerprint_weights, save_adapter, sum_bits
from ratchet.models.lora.layers import derive_mask_seed
from ratchet.models.policy import PolicyModel
from ratchet.models.scalar_head import ScalarHead, save_head
from ratchet.protocols import Exported, LossTerm, Shard
from ratchet.utils.thread_pool import ThreadPool, balance_by_size


class LocalLearner:
    """A learner that trains or scores with a `PolicyModel` in this process.

    Implements `Learner` and `Placeable`.

    Args:
        model: holds float32 (master) weights.
        optimizer: None makes a frozen role (a reference), which can only score.
        total_steps: optimizer steps of the schedule.
        unit: the unit that micro-batches never split.
        head: the scalar head for "values" and "scores".
        autocast: on an accelerator the forward runs under bfloat16 autocast.
        shared_vocab: number of leading vocabulary entries shared with the models that it is
            compared with token by token ("topk_logprobs"); None: all.
        replays: replay the sampler's expert choices if a batch has them; for the model that
            sampled.
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
        replays: bool = False,
    ) -> None:
        self.model = model
        self.config = config
        self.head = head
        self.unit: Level = unit
        model.checkpointing = config.activation_checkpointing
        device = next(model.parameters()).device.type
        chunk_mib = resolve_chunk_mib(config.logprob_chunk_mib, device)
        forward = Forward(
            model,
            head,
            chunk_mib=chunk_mib,
            autocast=autocast,
            shared_vocab=shared_vocab,
            replays=replays,
        )
        self.device = forward.device
        self.dtype = forward.dtype
        # In a run "auto" has been replaced by a measured number. An accelerator computes one
        # micro-batch at a time.
        self.thread_pool = ThreadPool(
            1 if config.workers == "auto" or device != "cpu" else config.workers
        )
        # One forward for each worker. The optimizer reads the gradients of the first.
        self.forwards = (
            [forward, *(forward.with_own_gradients() for _ in range(self.thread_pool.size - 1))]
            if optimizer
            else [forward] * self.thread_pool.size
        )
        self.optimizer: AdamW | None = None
        if optimizer is not None:
            self.optimizer = build(optimizer, forward.parameters(), matrices=model.matrices())
        self._offloader = Offloader([model, head], self.optimizer)
        self.step_policy = (
            None
            if optimizer is None
            else StepPolicy(optimizer, total=total_steps, max_bad=config.max_bad_steps)
        )

    # --- scoring

    async def score(
        self, batch: Batch, wanted: Sequence[str], *, top_k: int = 0
    ) -> Mapping[str, Tensor]:
        # Score an empty batch too, so that its columns have the right width.
        plan = self._plan(batch) or [[]]
        scored = self._score_micros(batch, plan, wanted, top_k)
        on_cpu = [{name: columns[name].to("cpu") for name in wanted} for columns in scored]
        return gather_columns(batch, plan, on_cpu)

    async def score_base(
        self, batch: Batch, wanted: Sequence[str], *, top_k: int = 0
    ) -> Mapping[str, Tensor]:
        """Score like `score`, without the model's adapter.

        It never awaits, so a generator that shares the model can't run while the adapter is off.
        """
        with ExitStack() as contexts:
            for forward in self.forwards:
                contexts.enter_context(forward.model.without_adapter())
            return await self.score(batch, wanted, top_k=top_k)

    def _score_micros(
        self, batch: Batch, plan: Sequence[list[int]], wanted: Sequence[str], top_k: int
    ) -> list[Mapping[str, Tensor]]:
        """Return the columns of each micro-batch of the plan."""

        def score(forward: Forward, number: int) -> Mapping[str, Tensor]:
            return forward.score(batch.take(plan[number]), wanted, top_k=top_k)

        return self._run_micros(batch, plan, score)

    # --- updating

    async def update(self, mini: Batch, terms: Sequence[LossTerm]) -> Mapping[str, float]:
        """Take one optimizer step on a mini-batch."""
        optimizer = self.optimizer
        step_policy = self.step_policy
        assert optimizer is not None, "a frozen role was asked to update"
        assert step_policy is not None
        metrics = step_policy.begin()
        active = select_weighted_rows(mini, terms)
        if not active:
            return {**metrics, "skipped_empty": 1.0}
        sums = self._accumulate(
            mini if len(active) == mini.n_sequences else mini.take(active), terms
        )
        parameters = [parameter for _, parameter in self.forwards[0].parameters()]
        norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        metrics |= {name: float(value) for name, value in sums.items()} | {"grad_norm": float(norm)}
        try:
            if not step_policy.is_finite_step(metrics["grad_norm"], metrics["loss"]):
                return {**metrics, "skipped_nonfinite": 1.0}
            if step_policy.config.max_grad_norm is not None:
                nn.utils.clip_grads_with_norm_(parameters, step_policy.config.max_grad_norm, norm)
            optimizer.step(metrics["lr"])
        finally:
            optimizer.zero_grad()
        return metrics

    def gradient(self, mini: Batch, terms: Sequence[LossTerm]) -> tuple[list[Tensor], float]:
        """Return (the gradient of each parameter, the loss) before clipping; change nothing.

        mini: a weighed mini-batch, or some of its sequences. Gradients of the parts of a mini-batch
        add up to that of the whole, except for the adapter's dropout.
        """
        assert self.optimizer is not None, "a frozen role has no gradient"
        sums = self._accumulate(mini, terms)
        gradients = [
            torch.zeros_like(p) if p.grad is None else p.grad
            for _, p in self.forwards[0].parameters()
        ]
        self.optimizer.zero_grad()
        return gradients, float(sums.get("loss", 0.0))

    def _accumulate(self, mini: Batch, terms: Sequence[LossTerm]) -> dict[str, Tensor]:
        """Return sums of losses and metrics over all micro-batches; gradients add up in `.grad`.

        Micro-batches are added in a fixed order, whichever worker is faster, for reproducible runs.
        """
        sums: dict[str, Tensor] = {}
        taken = 0 if self.step_policy is None else self.step_policy.steps_taken
        plan = self._plan(mini)

        def learn(forward: Forward, number: int) -> Mapping[str, Tensor]:
            # Seed the adapter's dropout by the step and the micro-batch's number in it, as
            # distributed learners do.
            return forward.learn(
                mini.take(plan[number]), terms, seed=derive_mask_seed(taken, number)
            )

        for numbers in self._run_micros(mini, plan, learn):
            for key, value in numbers.items():
                sums[key] = sums.get(key, 0.0) + value
        for forward in self.forwards[1:]:
            _move_gradients(forward, self.forwards[0])
        return sums

    def _run_micros(
        self,
        batch: Batch,
        plan: Sequence[list[int]],
        work: Callable[[Forward, int], Mapping[str, Tensor]],
    ) -> list[Mapping[str, Tensor]]:
        """Return the result of each micro-batch, in order.

        work: called with a worker's forward and the micro-batch's number in the plan.
        """
        lengths = batch.lengths_S.tolist()
        shares = balance_by_size(
            [sum(lengths[row] for row in rows) for rows in plan], self.thread_pool.size
        )

        def run_share(forward: Forward, share: list[int]) -> list[Mapping[str, Tensor]]:
            return [work(forward, number) for number in share]

        by_worker = self.thread_pool.run(
            [
                partial(run_share, forward, share)
                for forward, share in zip(self.forwards, shares, strict=True)
            ]
        )
        by_number = {
            number: result
            for share, results in zip(shares, by_worker, strict=True)
            for number, result in zip(share, results, strict=True)
        }
        return [by_number[number] for number in range(len(plan))]

    def _plan(self, batch: Batch) -> list[list[int]]:
        """Return the rows of each micro-batch."""
        limit = resolve_micro_batch_tokens(self.config.micro_batch_tokens, self.device.type)
        shares_prefixes = self.model.shares_prefixes
        return plan_microbatches(
            batch,
            max_tokens=limit,
            unit=self.unit,
            shares=shares_prefixes,
            workers=self.thread_pool.size,
        )

    # --- weights and state

    async def onload(self) -> None:
        self._offloader.onload()

    async def offload(self) -> None:
        self._offloader.offload()

    def weights(self) -> Iterator[Shard]:
        resting = self.model.resting()
        for name, tensor in self.model.canonical_weights():
            yield Shard(
                name,
                tuple(tensor.shape),
                (0,) * tensor.dim(),
                tensor.detach(),
                rests=name in resting,
            )
        for name, tensor in self.model.adapter_weights():
            yield Shard(name, tuple(tensor.shape), (0,) * tensor.dim(), tensor.detach())

    def fingerprint(self) -> str:
        return fingerprint_weights(
            {name: sum_bits(parameter) for name, parameter in self.forwards[0].parameters()}
        )

    def save(self, directory: Path) -> None:
        state: dict[str, object] = {"steps_taken": 0, "bad_steps": 0}
        if self.step_policy is not None:
            state = {
                "steps_taken": self.step_policy.steps_taken,
                "bad_steps": self.step_policy.bad_steps,
            }
        state["parameters"] = {
            name: parameter.detach() for name, parameter in self.forwards[0].parameters()
        }
        if self.optimizer is not None:
            # Save in the order of the parameters, not of their first gradients, so that equal
            # states give equal files.
            moments = self.optimizer.state
            state["optimizer"] = {
                name: moments[name] for name, _ in self.optimizer.named if name in moments
            }
        if self.model.resting():
            state["base"] = self._base_fingerprint
        save_state(directory, state)

    @cached_property
    def _base_fingerprint(self) -> str:
        """The fingerprint of the frozen weights beside an adapter, which checkpoints leave out."""
        resting = self.model.resting()
        return fingerprint_weights(
            {
                name: sum_bits(weight)
                for name, weight in self.model.canonical_weights()
                if name in resting
            }
        )

    def export(self, directory: Path, *, averaged: bool = False, part: Exported = "all") -> None:
        with (
            self.optimizer.averaged() if averaged and self.optimizer is not None else nullcontext()
        ):
            if part == "adapter":
                assert self.model.adapter is not None, "the model has no adapter"
                names = self.model.check_adapter(self.model.adapter.lora)
                save_adapter(
                    directory, self.model.adapter, names, dict(self.model.adapter_weights())
                )
                return
            self.model.save(directory, None if part == "base" else self.model.merged_weights())
            if self.head is not None and part == "all":
                save_head(self.head, directory)

    def load(self, directory: Path) -> None:
        state = load_state(directory)
        if self.model.resting():
            check_base(directory, state.get("base"), self._base_fingerprint)
        if self.step_policy is not None:
            self.step_policy.steps_taken = state["steps_taken"]
            self.step_policy.bad_steps = state["bad_steps"]
        with torch.no_grad():
            for name, parameter in self.forwards[0].parameters():
                parameter.copy_(state["parameters"][name])
        if self.optimizer is not None:
            self.optimizer.load(state["optimizer"])


def _move_gradients(source: Forward, target: Forward) -> None:
    """Add the gradients of `source` to those of `target`, and clear them in `source`."""
    pairs = zip(source.parameters(), target.parameters(), strict=True)
    for (_, source_parameter), (_, target_parameter) in pairs:
        gradient = source_parameter.grad
        if gradient is not None:
            total = target_parameter.grad
            target_parameter.grad = gradient if total is None else total.add_(gradient)
            source_parameter.grad = None
