"""The learner of one process: autograd on packed micro-batches, an optimizer, and nothing but sums
in between.

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
from ratchet.config.resolve import construct
from ratchet.config.schema import OptimizerConfig
from ratchet.learners.compute.forward import Forward, logits_mib
from ratchet.learners.compute.microbatch_dispatch import gather_columns
from ratchet.learners.compute.microbatching import most_tokens, plan_microbatches, weighing_rows
from ratchet.learners.config import LocalConfig
from ratchet.learners.offload import Residence
from ratchet.learners.optim.adamw import AdamW
from ratchet.learners.optim.step_policy import Pace
from ratchet.models.lora.files import bit_sum, check_base, fingerprint, save_adapter
from ratchet.models.lora.layers import mask_seed
from ratchet.models.policy import PolicyModel
from ratchet.models.scalar_head import ScalarHead, save_head
from ratchet.protocols import Exported, LossTerm, Shard
from ratchet.utils.thread_pool import Crew, dealt


class LocalLearner:
    """Implements `Learner` and `Placeable` for a `PolicyModel` in this process.

    model: holds float32 (master) weights; on an accelerator the forward runs under bfloat16
    autocast when `autocast`. optimizer: None makes a frozen role (a reference), which can only
    score. total_steps: optimizer steps of the schedule. head: the scalar head that "values" and
    "scores" read. unit: what a micro-batch never splits. shared_vocab: how many tokens, the first
    ones, it has in common with models that it is compared with token by token ("topk_logprobs");
    None: all. replays: whether the sampler's routes are its own, where a batch has them: for the
    model that sampled.
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
        self.model, self.config, self.head = model, config, head
        self.unit: Level = unit
        model.checkpointing = config.activation_checkpointing
        device = next(model.parameters()).device.type
        chunk_mib = logits_mib(config.logprob_chunk_mib, device)
        own = Forward(
            model,
            head,
            chunk_mib=chunk_mib,
            autocast=autocast,
            shared_vocab=shared_vocab,
            replays=replays,
        )
        self.device, self.dtype = own.device, own.dtype
        # "auto" is a number in a run, which has measured it; an accelerator does one thing at a
        # time.
        self.crew = Crew(1 if config.workers == "auto" or device != "cpu" else config.workers)
        # The first one's gradients are those that the optimizer reads.
        self.hands = (
            [own, *(own.twin() for _ in range(self.crew.size - 1))]
            if optimizer
            else [own] * self.crew.size
        )
        self.optimizer: AdamW | None = None
        if optimizer is not None:
            self.optimizer = construct(optimizer, own.parameters(), matrices=model.matrices())
        self._residence = Residence([model, head], self.optimizer)
        self.pace = (
            None
            if optimizer is None
            else Pace(optimizer, total=total_steps, max_bad=config.max_bad_steps)
        )

    # --- scoring

    async def score(
        self, batch: Batch, wanted: Sequence[str], *, top_k: int = 0
    ) -> Mapping[str, Tensor]:
        plan = self._plan(batch) or [[]]  # an empty batch has columns too, of the right width
        found = self._scored(batch, plan, wanted, top_k)
        return gather_columns(
            batch, plan, [{name: part[name].to("cpu") for name in wanted} for part in found]
        )

    async def score_base(
        self, batch: Batch, wanted: Sequence[str], *, top_k: int = 0
    ) -> Mapping[str, Tensor]:
        """As `score`, without the model's adapter. It never waits, so a generator that shares the
        model sees nothing of it."""
        with ExitStack() as off:
            for hand in self.hands:
                off.enter_context(hand.model.without_adapter())
            return await self.score(batch, wanted, top_k=top_k)

    def _scored(
        self, batch: Batch, plan: Sequence[list[int]], wanted: Sequence[str], top_k: int
    ) -> list[Mapping[str, Tensor]]:
        def score(hand: Forward, number: int) -> Mapping[str, Tensor]:
            return hand.score(batch.take(plan[number]), wanted, top_k=top_k)

        return self._shared_out(batch, plan, score)

    # --- updating

    async def update(self, mini: Batch, terms: Sequence[LossTerm]) -> Mapping[str, float]:
        optimizer, pace = self.optimizer, self.pace
        assert optimizer is not None, "a frozen role was asked to update"
        assert pace is not None
        metrics = pace.begin()
        active = weighing_rows(mini, terms)
        if not active:
            return {**metrics, "skipped_empty": 1.0}
        sums = self._accumulate(
            mini if len(active) == mini.n_sequences else mini.take(active), terms
        )
        parameters = [parameter for _, parameter in self.hands[0].parameters()]
        norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        metrics |= {name: float(value) for name, value in sums.items()} | {"grad_norm": float(norm)}
        try:
            if not pace.sound(metrics["grad_norm"], metrics["loss"]):
                return {**metrics, "skipped_nonfinite": 1.0}
            if pace.config.max_grad_norm is not None:
                nn.utils.clip_grads_with_norm_(parameters, pace.config.max_grad_norm, norm)
            optimizer.step(metrics["lr"])
        finally:
            optimizer.zero_grad()
        return metrics

    def gradient(self, mini: Batch, terms: Sequence[LossTerm]) -> tuple[list[Tensor], float]:
        """(of each parameter, the loss) for a weighed mini-batch, or for some of its sequences,
        before clipping; changes nothing. Gradients of the parts of a mini-batch add up to that of
        the whole, but for what an adapter drops."""
        assert self.optimizer is not None, "a frozen role has no gradient"
        sums = self._accumulate(mini, terms)
        found = [
            torch.zeros_like(p) if p.grad is None else p.grad for _, p in self.hands[0].parameters()
        ]
        self.optimizer.zero_grad()
        return found, float(sums.get("loss", 0.0))

    def _accumulate(self, mini: Batch, terms: Sequence[LossTerm]) -> dict[str, Tensor]:
        """Sums of losses and metrics over all micro-batches; gradients add up in `.grad`. The same
        sums in the same order, whoever is faster: a run can be repeated."""
        sums: dict[str, Tensor] = {}
        taken = 0 if self.pace is None else self.pace.taken

        plan = self._plan(mini)

        def learn(hand: Forward, number: int) -> Mapping[str, Tensor]:
            # As ranks seed what their adapters drop: by the step and the micro-batch's number in
            # it.
            return hand.learn(mini.take(plan[number]), terms, seed=mask_seed(taken, number))

        for found in self._shared_out(mini, plan, learn):
            for key, value in found.items():
                sums[key] = sums.get(key, 0.0) + value
        for hand in self.hands[1:]:
            _hand_over(hand, self.hands[0])
        return sums

    def _shared_out(
        self,
        batch: Batch,
        plan: Sequence[list[int]],
        work: Callable[[Forward, int], Mapping[str, Tensor]],
    ) -> list[Mapping[str, Tensor]]:
        """Return what comes of each micro-batch, in order. work: takes a micro-batch's number in
        the plan."""
        lengths = batch.lengths_S.tolist()
        shares = dealt([sum(lengths[row] for row in rows) for rows in plan], self.crew.size)

        def some(hand: Forward, share: list[int]) -> list[Mapping[str, Tensor]]:
            return [work(hand, number) for number in share]

        done = self.crew.run(
            [partial(some, hand, share) for hand, share in zip(self.hands, shares, strict=True)]
        )
        found = {
            i: part
            for share, parts in zip(shares, done, strict=True)
            for i, part in zip(share, parts, strict=True)
        }
        return [found[i] for i in range(len(plan))]

    def _plan(self, batch: Batch) -> list[list[int]]:
        limit = most_tokens(self.config.micro_batch_tokens, self.device.type)
        shares = self.model.shares_prefixes
        return plan_microbatches(
            batch, max_tokens=limit, unit=self.unit, shares=shares, hands=self.crew.size
        )

    # --- weights and state

    async def onload(self) -> None:
        self._residence.enter()

    async def offload(self) -> None:
        self._residence.leave()

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
        return fingerprint(
            {name: bit_sum(parameter) for name, parameter in self.hands[0].parameters()}
        )

    def save(self, directory: Path) -> None:
        state: dict[str, object] = {"steps_taken": 0, "bad_steps": 0}
        if self.pace is not None:
            state = {"steps_taken": self.pace.taken, "bad_steps": self.pace.bad}
        state["parameters"] = {
            name: parameter.detach() for name, parameter in self.hands[0].parameters()
        }
        if self.optimizer is not None:
            # In the parameters' order, not in that of their first gradients: equal states are equal
            # files.
            own = self.optimizer.state
            state["optimizer"] = {
                name: own[name] for name, _ in self.optimizer.named if name in own
            }
        if self.model.resting():
            state["base"] = self._base
        save_state(directory, state)

    @cached_property
    def _base(self) -> str:
        """Of the weights that rest, which a checkpoint leaves out."""
        resting = self.model.resting()
        return fingerprint(
            {
                name: bit_sum(weight)
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
            check_base(directory, state.get("base"), self._base)
        if self.pace is not None:
            self.pace.taken, self.pace.bad = state["steps_taken"], state["bad_steps"]
        with torch.no_grad():
            for name, parameter in self.hands[0].parameters():
                parameter.copy_(state["parameters"][name])
        if self.optimizer is not None:
            self.optimizer.load(state["optimizer"])


def _hand_over(source: Forward, target: Forward) -> None:
    """Adds one's gradients to the other's, and leaves none."""
    for (_, given), (_, kept) in zip(source.parameters(), target.parameters(), strict=True):
        if given.grad is not None:
            kept.grad = given.grad if kept.grad is None else kept.grad.add_(given.grad)
            given.grad = None
