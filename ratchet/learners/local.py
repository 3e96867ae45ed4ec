"""The learner of one process: autograd on packed micro-batches, AdamW, and nothing but sums in between.

T = tokens, S = sequences of a micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch import Tensor, nn

from ratchet.batch import Batch, Level
from ratchet.checkpoint.state import load_state, save_state
from ratchet.config.schema import OptimizerConfig
from ratchet.errors import TrainingError
from ratchet.interfaces import LossTerm, Outputs, Shard
from ratchet.learners.columns import SCALARS, Wanted, sequence_scores, state_values, token_columns
from ratchet.learners.config import LocalConfig
from ratchet.learners.plan import plan_microbatches
from ratchet.learners.schedule import lr_factor
from ratchet.models.heads import ScalarHead, save_head
from ratchet.models.policy import PolicyModel

PREDICTIONS = frozenset({"logprobs", "old_logprobs", "entropy", "topk_logprobs", "topk_ids"})
MAX_MICRO_BATCH_TOKENS = 1024  # "auto" on a CPU: larger ones fall out of its cache and are slower
MAX_MICRO_BATCH_TOKENS_GPU = 16384


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
        self.shared_vocab = shared_vocab
        self.model, self.config, self.head = model, config, head
        self.unit: Level = unit
        self.device = next(model.parameters()).device
        # Losses run in float32 or, for float64 models, in float64: never below.
        self.dtype = torch.promote_types(next(model.parameters()).dtype, torch.float32)
        self.autocast = autocast
        model.checkpointing = config.activation_checkpointing
        self.schedule, self.total_steps = optimizer, total_steps
        self.optimizer = None if optimizer is None else _adamw(self._named_parameters(), optimizer)
        self.steps_taken = 0  # counts optimizer steps, skipped ones included: the schedule is a function of it
        self.bad_steps = 0  # non-finite ones in a row

    def _named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        named = list(self.model.named_parameters())
        if self.head is not None:
            named += [(f"head.{name}", parameter) for name, parameter in self.head.named_parameters()]
        return named

    # --- scoring

    async def score(self, batch: Batch, wanted: Sequence[str], *, top_k: int = 0) -> Mapping[str, Tensor]:
        columns: dict[str, Tensor] = {}
        starts, lengths = batch.starts_S.tolist(), batch.lengths_S.tolist()
        asked = Wanted.among(wanted, top_k=top_k, shared=self.shared_vocab)
        with torch.no_grad():
            for rows in self._plan(batch) or [[]]:  # an empty batch has columns too, of the right width
                micro = batch.take(rows).to(self.device, self.dtype)
                found = self._columns(micro, micro.predicted_T, wanted, asked)
                spans = [torch.arange(starts[row], starts[row] + lengths[row]) for row in rows]
                tokens = torch.cat(spans) if spans else slice(0)
                for name in wanted:
                    part = found[name].to("cpu")
                    size = batch.n_sequences if name == "scores" else batch.n_tokens
                    column = columns.setdefault(name, part.new_zeros(size, *part.shape[1:]))
                    column[rows if name == "scores" else tokens] = part
        return columns

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
        parameters = [parameter for _, parameter in self._named_parameters()]
        norm = float(nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]))
        metrics |= {name: float(value) for name, value in sums.items()} | {"grad_norm": norm}
        if not (math.isfinite(norm) and math.isfinite(metrics["loss"])):
            optimizer.zero_grad()
            self._count_bad_step(norm, metrics["loss"])
            return {**metrics, "skipped_nonfinite": 1.0}
        self.bad_steps = 0
        if schedule.max_grad_norm is not None:
            nn.utils.clip_grads_with_norm_(parameters, schedule.max_grad_norm, torch.tensor(norm))
        for group in optimizer.param_groups:
            group["lr"] = schedule.lr * factor
        optimizer.step()
        optimizer.zero_grad()
        return metrics

    def _accumulate(self, mini: Batch, terms: Sequence[LossTerm]) -> dict[str, Tensor]:
        """Sums of losses and metrics over all micro-batches; gradients add up in `.grad`."""
        needs = frozenset[str]().union(*(term.needs for term in terms))
        # A term of coefficient 0 is only measured: what nothing else needs gets no gradient.
        learned = frozenset[str]().union(*(term.needs for term in terms if mini.weights[term.name].coef))
        sums: dict[str, Tensor] = {}
        for rows in self._plan(mini):
            micro = mini.take(rows).to(self.device, self.dtype)
            out = self._outputs(micro, needs, measured=needs - learned)
            total = torch.zeros((), dtype=self.dtype, device=self.device)
            for term in terms:
                loss, measured = term(out, micro)
                total = total + loss
                named = {f"{term.name}/{key}": value for key, value in measured.items()}
                if mini.weights[term.name].coef:
                    named[term.name] = loss.detach()
                for key, value in named.items():
                    sums[key] = sums.get(key, 0.0) + value
            sums["loss"] = sums.get("loss", 0.0) + total.detach()
            total.backward()
        return sums

    def _count_bad_step(self, norm: float, loss: float) -> None:
        self.bad_steps += 1
        if self.bad_steps >= self.config.max_bad_steps:
            raise TrainingError(
                f"{self.bad_steps} optimizer steps in a row were not finite (loss {loss}, gradient norm {norm}); weights are "
                "those before them: lower optimizer.lr"
            )

    # --- the forward that both share

    def _plan(self, batch: Batch) -> list[list[int]]:
        limit = self.config.micro_batch_tokens
        if limit == "auto":
            limit = MAX_MICRO_BATCH_TOKENS if self.device.type == "cpu" else MAX_MICRO_BATCH_TOKENS_GPU
        return plan_microbatches(batch, max_tokens=int(limit), unit=self.unit, shares=self.model.shares_prefixes)

    def _outputs(self, micro: Batch, needs: Collection[str], *, measured: Collection[str] = ()) -> Outputs:
        given = micro.has("teacher_ids")
        wanted = Wanted.among(needs, given_ids=given, shared=self.shared_vocab, measured=measured)
        columns = self._columns(micro, micro.predicted_T, needs, wanted)
        if "old_logprobs" in needs:
            own = micro.need("old_logprobs") if micro.has("old_logprobs") else columns["logprobs"]
            columns["old_logprobs"] = own.detach()
        return Outputs(sequence_sum=micro.sequence_sum, **columns)

    def _columns(self, micro: Batch, mask_T: Tensor, needs: Collection[str], wanted: Wanted) -> dict[str, Tensor]:
        hidden_Td = torch.zeros(0, self.model.hidden_size, dtype=self.dtype, device=self.device)
        if micro.n_tokens:
            with self._precision():
                hidden_Td = self.model.hidden(micro.tokens_T, micro.positions_T, micro.lengths_S.tolist())
        columns: dict[str, Tensor] = {}
        if not PREDICTIONS.isdisjoint(needs):
            rows = rows_per_chunk(self.config.logprob_chunk_mib, self.model.vocab_size, self.dtype)
            columns |= token_columns(self.model.logits, hidden_Td, micro, mask_T, wanted, chunk_rows=rows)
        if not SCALARS.isdisjoint(needs):
            assert self.head is not None, "this role has no scalar head"
            scalars_T = self.head(hidden_Td.to(self.dtype))
            columns |= {"values": state_values(scalars_T, mask_T), "scores": sequence_scores(scalars_T, micro)}
            columns["token_scores"] = scalars_T
        return columns

    def _precision(self) -> AbstractContextManager[object]:
        return torch.autocast(self.device.type, torch.bfloat16) if self.autocast else nullcontext()

    # --- weights and state

    def weights(self) -> Iterator[Shard]:
        for name, tensor in self.model.canonical_weights():
            yield Shard(name, tuple(tensor.shape), (0,) * tensor.dim(), tensor.detach())

    def save(self, directory: Path) -> None:
        state: dict[str, object] = {"steps_taken": self.steps_taken, "bad_steps": self.bad_steps}
        state["parameters"] = {name: parameter.detach() for name, parameter in self._named_parameters()}
        if self.optimizer is not None:
            state["optimizer"] = self.optimizer.state_dict()["state"]
        save_state(directory, state)

    def export(self, directory: Path) -> None:
        self.model.save(directory)
        if self.head is not None:
            save_head(self.head, directory)

    def load(self, directory: Path) -> None:
        state = load_state(directory)
        self.steps_taken, self.bad_steps = state["steps_taken"], state["bad_steps"]
        with torch.no_grad():
            for name, parameter in self._named_parameters():
                parameter.copy_(state["parameters"][name])
        if self.optimizer is not None:
            self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": state["optimizer"]})


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


def rows_per_chunk(mib: int, vocab_size: int, dtype: torch.dtype) -> int:
    """How many rows of logits fit into so many MiB; at least one."""
    return max(1, mib * 2**20 // (vocab_size * dtype.itemsize))


def _adamw(named: Sequence[tuple[str, nn.Parameter]], config: OptimizerConfig) -> torch.optim.AdamW:
    """Decoupled weight decay (arXiv:1711.05101) on matrices only: decaying a norm's scale or a bias regularises nothing."""
    matrices = [p for _, p in named if p.dim() >= 2]
    vectors = [p for _, p in named if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)
