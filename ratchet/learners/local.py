"""The learner that trains and scores in one process, with autograd on packed micro-batches.

Losses and gradients of micro-batches are summed, not averaged, because the weights of the loss
terms contain the normalisers.
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
from ratchet.checkpoint.shapes import check_shapes
from ratchet.config.resolve import build
from ratchet.config.schema import OptimizerConfig
from ratchet.kernels import bfloat16
from ratchet.learners.compute.forward import Forward, resolve_chunk_mib
from ratchet.learners.compute.microbatch_dispatch import gather_columns
from ratchet.learners.compute.microbatching import (
    plan_microbatches,
    resolve_micro_batch_tokens,
    select_weighted_rows,
)
from ratchet.learners.config import LocalConfig
from ratchet.learners.device_memory import explain_out_of_memory
from ratchet.learners.offload import Offloader
from ratchet.learners.optim.adamw import AdamW
from ratchet.learners.optim.step_rules import OptimizerStepRules
from ratchet.models.layers.varlen import choose_varlen
from ratchet.models.lora.files import check_base, fingerprint_weights, save_adapter, sum_bits
from ratchet.models.lora.layers import derive_mask_seed
from ratchet.models.policy import PolicyModel
from ratchet.models.scalar_head import ScalarHead, save_head
from ratchet.models.weight_casts import keep_casts
from ratchet.protocols import ExportedPart, Learner, LossTerm, Shard
from ratchet.utils.thread_pool import ThreadPool, balance_by_size
from ratchet.utils.transfer import fetch_together


class LocalLearner(Learner):
    """A learner that trains or scores with a `PolicyModel` in this process.

    Args:
        config: The learner's section.
        model: The model, with float32 (master) weights.
        optimizer: The optimizer's section. None makes a frozen role (a reference), which can only
            score.
        total_steps: Optimizer steps of the learning-rate schedule.
        unit: The unit that micro-batches never split, "sequence" or "group".
        head: The scalar head for "values" and "scores".
        autocast: True to run forwards under bfloat16 autocast (mixed precision).
        shared_vocab: Number of leading vocabulary entries that teacher and student share, over
            which "topk_logprobs" are computed; None: the whole vocabulary.
        replays_routes: True to replay the sampler's expert choices, if a batch has them (router
            replay).
    """

    can_offload = True

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
        replays_routes: bool = False,
    ) -> None:
        self.model = model
        self.config = config
        self.head = head
        self.unit: Level = unit
        model.checkpointing = config.activation_checkpointing
        model.uses_varlen = choose_varlen(config.attention, next(model.parameters()).device)
        device = next(model.parameters()).device.type
        chunk_mib = resolve_chunk_mib(config.logprob_chunk_mib, device)
        forward = Forward(
            model,
            head,
            chunk_mib=chunk_mib,
            autocast=autocast,
            shared_vocab=shared_vocab,
            replays_routes=replays_routes,
        )
        self.device = forward.device
        self.dtype = forward.dtype
        # A run replaces "auto" by a measured number. An accelerator computes one micro-batch at a
        # time.
        self.thread_pool = ThreadPool(
            1 if config.workers == "auto" or device != "cpu" else config.workers
        )
        # One forward for each worker thread. The optimizer reads the gradients of the first.
        n_copies = self.thread_pool.size - 1
        self.forwards = (
            [forward, *(forward.copy_with_own_gradients() for _ in range(n_copies))]
            if optimizer
            else [forward] * self.thread_pool.size
        )
        self.optimizer: AdamW | None = None
        if optimizer is not None:
            self.optimizer = build(optimizer, forward.parameters(), matrices=model.matrices())
        self._offloader = Offloader([model, head], self.optimizer)
        self.step_rules = (
            None
            if optimizer is None
            else OptimizerStepRules(
                optimizer, total_steps=total_steps, max_bad_steps=config.max_bad_steps
            )
        )

    # --- scoring

    async def score(
        self, batch: Batch, output_names: Sequence[str], *, top_k: int = 0
    ) -> Mapping[str, Tensor]:
        # Score an empty batch too, so that its columns have the right width.
        plan = self._plan_micros(batch) or [[]]
        scored = self._score_micros(batch, plan, output_names, top_k)
        fetched = iter(
            fetch_together([columns[name] for columns in scored for name in output_names])
        )
        cpu_columns = [{name: next(fetched) for name in output_names} for _ in scored]
        return gather_columns(batch, plan, cpu_columns)

    async def score_base(
        self, batch: Batch, output_names: Sequence[str], *, top_k: int = 0
    ) -> Mapping[str, Tensor]:
        """Score like `score`, without the model's adapter.

        It never awaits, so a generator that shares the model can't run while the adapter is off.
        """
        with ExitStack() as contexts:
            for forward in self.forwards:
                contexts.enter_context(forward.model.without_adapter())
            return await self.score(batch, output_names, top_k=top_k)

    def _score_micros(
        self, batch: Batch, plan: Sequence[list[int]], output_names: Sequence[str], top_k: int
    ) -> list[Mapping[str, Tensor]]:
        """Return the columns of each micro-batch of the plan."""

        def score(forward: Forward, number: int) -> Mapping[str, Tensor]:
            return forward.score(batch.take(plan[number]), output_names, top_k=top_k)

        return self._run_micros(batch, plan, score)

    # --- updating

    async def update(self, mini: Batch, terms: Sequence[LossTerm]) -> Mapping[str, float]:
        """Take one optimizer step on a mini-batch."""
        optimizer = self.optimizer
        step_rules = self.step_rules
        assert optimizer is not None, "a frozen role can't be updated"
        assert step_rules is not None
        metrics = step_rules.begin()
        rows = select_weighted_rows(mini, terms)
        if not rows:
            return {**metrics, "skipped_empty": 1.0}
        sums = self._accumulate(mini if len(rows) == mini.n_sequences else mini.take(rows), terms)
        parameters = [parameter for _, parameter in self.forwards[0].parameters()]
        norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        metrics |= _fetch({**sums, "grad_norm": norm})
        try:
            if not step_rules.accept_step(metrics["grad_norm"], metrics["loss"]):
                return {**metrics, "skipped_nonfinite": 1.0}
            if step_rules.config.max_grad_norm is not None:
                nn.utils.clip_grads_with_norm_(parameters, step_rules.config.max_grad_norm, norm)
            optimizer.step(metrics["lr"])
        finally:
            optimizer.zero_grad()
        return metrics

    def gradient(self, mini: Batch, terms: Sequence[LossTerm]) -> tuple[list[Tensor], float]:
        """Return (the gradient of each parameter before clipping, the loss); change nothing.

        mini: a mini-batch with weights, or some of its sequences. If the sequences are divided over
        several calls, the gradients add up to the gradient of the whole, unless an adapter has
        dropout.
        """
        assert self.optimizer is not None, "a frozen role has no gradient"
        sums = self._accumulate(mini, terms)
        gradients = [
            torch.zeros_like(p) if p.grad is None else p.grad
            for _, p in self.forwards[0].parameters()
        ]
        self.optimizer.zero_grad()
        return gradients, float(sums.get("loss", 0.0))

    @torch.enable_grad()  # a reward's module may have turned gradients off in this thread
    def _accumulate(self, mini: Batch, terms: Sequence[LossTerm]) -> dict[str, Tensor]:
        """Accumulate gradients in `.grad`, and return the sums of losses and metrics.

        The micro-batches are summed in a fixed order, whichever worker is faster, so that runs are
        reproducible.
        """
        sums: dict[str, Tensor] = {}
        step = 0 if self.step_rules is None else self.step_rules.steps_taken
        plan = self._plan_micros(mini)

        def run_micro_batch(forward: Forward, number: int) -> Mapping[str, Tensor]:
            # The seed of the adapter's dropout depends on the step and on the micro-batch's number
            # in it, as in distributed learners.
            return forward.forward_backward(
                mini.take(plan[number]), terms, seed=derive_mask_seed(step, number)
            )

        def count_largest() -> int:
            return max(mini.take(rows).n_tokens for rows in plan)

        keeps_casts = self.forwards[0].autocast and len(plan) > 1
        casts = keep_casts() if keeps_casts else nullcontext()
        with explain_out_of_memory(count_largest), casts:
            metrics_by_micro = self._run_micros(mini, plan, run_micro_batch)
        for metrics in metrics_by_micro:
            for key, value in metrics.items():
                sums[key] = sums.get(key, 0.0) + value
        for forward in self.forwards[1:]:
            _move_gradients(forward, self.forwards[0])
        return sums

    def _run_micros(
        self,
        batch: Batch,
        plan: Sequence[list[int]],
        function: Callable[[Forward, int], Mapping[str, Tensor]],
    ) -> list[Mapping[str, Tensor]]:
        """Run a function on each micro-batch in the worker threads; return the results in order.

        function: called with a worker's forward and the micro-batch's number in the plan.
        """
        bfloat16.forget_weights()  # an optimizer step or a checkpoint may have changed them
        lengths = batch.lengths_S.tolist()
        numbers_by_worker = balance_by_size(
            [sum(lengths[row] for row in rows) for rows in plan], self.thread_pool.size
        )

        def run_worker(forward: Forward, numbers: list[int]) -> list[Mapping[str, Tensor]]:
            return [function(forward, number) for number in numbers]

        results_by_worker = self.thread_pool.run(
            [
                partial(run_worker, forward, numbers)
                for forward, numbers in zip(self.forwards, numbers_by_worker, strict=True)
            ]
        )
        result_by_number = {
            number: result
            for numbers, results in zip(numbers_by_worker, results_by_worker, strict=True)
            for number, result in zip(numbers, results, strict=True)
        }
        return [result_by_number[number] for number in range(len(plan))]

    def _plan_micros(self, batch: Batch) -> list[list[int]]:
        """Return the rows of each micro-batch."""
        return plan_microbatches(
            batch,
            max_tokens=resolve_micro_batch_tokens(self.config.micro_batch_tokens, self.device.type),
            unit=self.unit,
            shares_prefixes=self.model.shares_prefixes,
            workers=self.thread_pool.size,
        )

    # --- weights and state

    def count_later_bytes(self) -> int:
        return 0 if self.optimizer is None else self.optimizer.count_later_bytes()

    async def onload(self) -> None:
        self._offloader.onload()

    async def offload(self) -> None:
        self._offloader.offload()

    def weights(self) -> Iterator[Shard]:
        frozen_names = self.model.frozen_names()
        for name, tensor in self.model.canonical_weights():
            yield Shard(
                name,
                tuple(tensor.shape),
                (0,) * tensor.dim(),
                tensor.detach(),
                is_frozen=name in frozen_names,
            )
        for name, tensor in self.model.adapter_weights():
            yield Shard(name, tuple(tensor.shape), (0,) * tensor.dim(), tensor.detach())

    def fingerprint(self) -> str:
        return fingerprint_weights(
            {name: sum_bits(parameter) for name, parameter in self.forwards[0].parameters()}
        )

    def save(self, directory: Path) -> None:
        state: dict[str, object] = {"steps_taken": 0, "bad_steps": 0}
        if self.step_rules is not None:
            state = {
                "steps_taken": self.step_rules.steps_taken,
                "bad_steps": self.step_rules.bad_steps,
            }
        state["parameters"] = {
            name: parameter.detach() for name, parameter in self.forwards[0].parameters()
        }
        if self.optimizer is not None:
            # Save in the order of the parameters, so that equal states give equal files. The
            # optimizer's state is ordered by when each parameter first had a gradient.
            moments = self.optimizer.state
            state["optimizer"] = {
                name: moments[name]
                for name, _ in self.optimizer.named_parameters
                if name in moments
            }
        if self.model.frozen_names():
            state["base"] = self._base_fingerprint
        save_state(directory, state)

    @cached_property
    def _base_fingerprint(self) -> str:
        """The fingerprint of the frozen weights, which checkpoints hold in place of the weights."""
        frozen_names = self.model.frozen_names()
        return fingerprint_weights(
            {
                name: sum_bits(weight)
                for name, weight in self.model.canonical_weights()
                if name in frozen_names
            }
        )

    def export(
        self, directory: Path, *, averaged: bool = False, part: ExportedPart = "all"
    ) -> None:
        with (
            self.optimizer.use_averages()
            if averaged and self.optimizer is not None
            else nullcontext()
        ):
            if part == "adapter":
                assert self.model.adapter is not None, "the model has no adapter"
                names = self.model.resolve_adapter_layers(self.model.adapter.lora)
                save_adapter(
                    directory, self.model.adapter, names, dict(self.model.adapter_weights())
                )
                return
            self.model.save(directory, None if part == "base" else self.model.merged_weights())
            if self.head is not None and part == "all":
                save_head(self.head, directory)

    def load(self, directory: Path) -> None:
        """Load a checkpoint.

        Raises CheckpointError if it belongs to a model of another shape, or to other frozen
        weights. The learner is then unchanged.
        """
        state = load_state(directory)
        stored_shapes = {name: value.shape for name, value in state["parameters"].items()}
        shapes = {name: value.shape for name, value in self.forwards[0].parameters()}
        check_shapes(directory, stored_shapes, shapes)
        if self.model.frozen_names():
            check_base(directory, state.get("base"), self._base_fingerprint)
        if self.step_rules is not None:
            self.step_rules.steps_taken = state["steps_taken"]
            self.step_rules.bad_steps = state["bad_steps"]
        with torch.no_grad():
            for name, parameter in self.forwards[0].parameters():
                parameter.copy_(state["parameters"][name])
        if self.optimizer is not None:
            self.optimizer.load(state["optimizer"])


def _fetch(values: Mapping[str, Tensor]) -> dict[str, float]:
    """Return scalars of the device as numbers, after one wait for all of them."""
    # MPS has no float64.
    is_mps = any(value.device.type == "mps" for value in values.values())
    dtype = torch.float32 if is_mps else torch.float64
    together = torch.stack([value.to(dtype) for value in values.values()])
    return dict(zip(values, together.tolist(), strict=True))


def _move_gradients(source: Forward, target: Forward) -> None:
    """Add the gradients of `source` to those of `target`, and clear them in `source`."""
    pairs = zip(source.parameters(), target.parameters(), strict=True)
    for (_, source_parameter), (_, target_parameter) in pairs:
        gradient = source_parameter.grad
        if gradient is not None:
            total = target_parameter.grad
            target_parameter.grad = gradient if total is None else total.add_(gradient)
            source_parameter.grad = None
