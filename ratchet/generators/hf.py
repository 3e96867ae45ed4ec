"""Generate with any causal language model of transformers: one padded batch after another, with
transformers' own KV cache.

A model that reads images, audio or videos gets the media of the prompts in the prefill.

It serves models that the engine can't run, and is slower (padding, no continuous batching, no
shared prompts). Seeds mean the same in both: with equal weights they give equal tokens,
except where logits differ in their last bits.

N = rows of the batch, L = tokens of the longest row, V = vocabulary.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from ratchet.errors import ModelError, RequestFailed
from ratchet.generators.async_engine import AsyncEngine
from ratchet.generators.config import HFConfig
from ratchet.generators.engine.sampling import SamplingSettings, draw_tokens, draw_uniforms
from ratchet.generators.engine.stop_strings import TextDecoder
from ratchet.generators.faults import explain_nonfinite, make_request_error
from ratchet.generators.request import GenerationRequest
from ratchet.models.decoder import Decoder
from ratchet.models.policy import DecoderPolicy, PolicyModel
from ratchet.types import StopReason

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ratchet.models.transformers.multimodal_policy import MultimodalPolicy
    from ratchet.models.transformers.policy import TransformersPolicy


class HFGenerator(AsyncEngine):
    """A generator on a transformers model. It reads the model's parameters at every step.

    model: an instance of `AutoModelForCausalLM`, or a policy around one. Prompts may have media if
    it is a policy that reads them (`ratchet.models.transformers.multimodal_policy`).

    Raises ModelError for the built-in decoder.
    """

    core: PaddedBatches

    def __init__(
        self,
        config: HFConfig,
        model: PreTrainedModel | PolicyModel | nn.Module,
        tokenizer: TextDecoder | None = None,
    ) -> None:
        if isinstance(model, Decoder | DecoderPolicy):
            raise ModelError(
                "the built-in decoder isn't a transformers model: set generator.kind to engine"
            )
        causal: Any = _unwrapped(model) if isinstance(model, PolicyModel) else model
        text = causal.config.get_text_config()
        positions = getattr(text, "max_position_embeddings", None) or config.max_context
        if positions is None:
            raise ModelError(
                f"{type(causal).__name__} doesn't name its longest context: set "
                "generator.max_context"
            )
        vocab_size = causal.get_output_embeddings().weight.shape[0]
        weights = (
            model.canonical_weights
            if isinstance(model, PolicyModel)
            else partial(_named_weights, causal)
        )
        vision: Any = model if isinstance(model, PolicyModel) and model.reads_media else None
        super().__init__(
            PaddedBatches(
                causal, max_running=config.max_running, vocab_size=vocab_size, vision=vision
            ),
            weights,
            causal.parameters,
            tokenizer,
            vocab_size=vocab_size,
            max_context=min(config.max_context or positions, positions),
            keep_kv=config.keep_kv,
            policy=model if isinstance(model, PolicyModel) else None,
            reads_media=vision is not None,
        )


def _unwrapped(policy: PolicyModel) -> Any:
    # The class is not imported at run time, because its module imports transformers.
    wrapping: TransformersPolicy = policy  # pyright: ignore[reportAssignmentType]
    return wrapping.model


def _named_weights(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [(name, parameter.detach()) for name, parameter in model.named_parameters()]


class _Row:
    """A running request: its sequence so far, and the values recorded for its new tokens."""

    def __init__(self, request: GenerationRequest) -> None:
        self.request = request
        self.tokens: list[int] = request.prompt.tolist()
        self.logprobs: list[float] = []
        self.log_kept: list[float] = []

    def add(self, token: int, logprob: float, log_kept: float) -> StopReason | RequestFailed | None:
        """Append a token and return why the completion has ended, if it has.

        Text that can't be decoded fails the request: the error is returned.
        """
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.log_kept.append(log_kept)
        request = self.request
        try:
            matched = request.watch is not None and request.watch.feed(token)
        except RequestFailed as error:
            return error
        if token in request.sampling.stop_ids:
            return StopReason.STOP_TOKEN
        if matched:
            return StopReason.STOP_STRING
        return request.reason_at_limit if len(self.tokens) == request.limit else None

    def deliver(self, stop: StopReason) -> None:
        new = np.array(self.tokens[len(self.request.prompt) :], dtype=np.int64)
        logprobs, log_kept = (
            np.array(column, dtype=np.float32) for column in (self.logprobs, self.log_kept)
        )
        self.request.deliver(self.request.complete(new, logprobs, log_kept, stop))


class PaddedBatches:
    """An `EngineCore` that runs waiting requests as a batch, padded on the left.

    Rows leave the batch when they end; the next batch starts when it is empty.

    vision: the policy around a model that reads media; None: the model reads text alone.
    """

    def __init__(
        self,
        model: Any,
        *,
        max_running: int,
        vocab_size: int,
        vision: MultimodalPolicy | None = None,
    ) -> None:
        self.model = model
        self.max_running = max_running
        self.vocab_size = vocab_size
        self.vision = vision
        self.waiting: deque[GenerationRequest] = deque()
        self.rows: list[_Row] = []
        self.version = 0
        # transformers' KV cache of all rows; None: it must be computed.
        self._cache: Any = None
        self._mask_NL = torch.zeros(0, 0, dtype=torch.int64)
        # Position of the next input token, the same in all axes of an M-RoPE.
        self._next_N = torch.zeros(0, dtype=torch.int64)

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.rows)

    def add(self, request: GenerationRequest) -> None:
        self.waiting.append(request)

    def cancel(self, request: GenerationRequest) -> None:
        if request in self.waiting:
            self.waiting.remove(request)
        self._keep([i for i, row in enumerate(self.rows) if row.request is not request])

    def abort(self) -> None:
        rows = self.rows + [_Row(request) for request in self.waiting]
        self.reset()
        for row in rows:
            row.deliver(StopReason.ABORTED)

    def reset(self) -> list[GenerationRequest]:
        requests = [*(row.request for row in self.rows), *self.waiting]
        self.rows = []
        self.waiting = deque()
        self._cache = None
        return requests

    def commit(self, version: int, *, keep_kv: bool) -> None:
        self.version = version
        if not keep_kv:
            self._cache = None
        for row in self.rows:
            row.request.marks.append((len(row.logprobs), version))

    @torch.no_grad()
    def step(self) -> None:
        """Compute one token for every row, after starting a batch if none runs.

        A request that can't be computed fails alone. Raises ModelError if the weights are broken,
        so that no request can be served.
        """
        if not self.rows:
            count = min(len(self.waiting), self.max_running)
            self.rows = [_Row(self.waiting.popleft()) for _ in range(count)]
            for row in self.rows:
                row.request.marks.append((0, self.version))
        training = self.model.training
        # In training mode transformers applies dropout, and with activation checkpointing it
        # fills no cache.
        self.model.eval()
        try:
            computed = self._compute()
        finally:
            self.model.train(training)
        if computed is None:
            return
        settings, logits_NV = computed
        device = logits_NV.device
        index_N = torch.tensor([len(row.logprobs) for row in self.rows], device=device)
        drawn = draw_tokens(logits_NV, draw_uniforms(settings.streams_N, index_N), settings)
        finite_N = drawn.logprobs_N.isfinite()
        errors = {} if finite_N.all() else self._explain_errors(finite_N)
        log_kept_N = torch.zeros_like(drawn.logprobs_N)
        if settings.filters is not None and drawn.log_kept_F is not None:
            log_kept_N[settings.filters.rows_F] = drawn.log_kept_F.to(log_kept_N.dtype)
        columns = zip(
            drawn.tokens_N.tolist(), drawn.logprobs_N.tolist(), log_kept_N.tolist(), strict=True
        )
        reasons = [
            errors.get(row.request) or row.add(*column)
            for row, column in zip(self.rows, columns, strict=True)
        ]
        ended = [
            (row, reason)
            for row, reason in zip(self.rows, reasons, strict=True)
            if reason is not None
        ]
        self._keep([i for i, reason in enumerate(reasons) if reason is None])
        for row, reason in ended:
            if isinstance(reason, Exception):
                row.request.fail(reason)
            else:
                row.deliver(reason)

    def _explain_errors(self, finite_N: Tensor) -> dict[GenerationRequest, Exception]:
        """Return the errors of rows whose logits aren't finite.

        Raises ModelError as `explain_nonfinite` does.
        """
        broken = {
            self.rows[i].request: len(self.rows[i].logprobs)
            for i in (~finite_N).nonzero()[:, 0].tolist()
        }
        weights = self.model.named_parameters()
        return explain_nonfinite(
            broken, all_rows=len(broken) == len(self.rows), weights=weights, version=self.version
        )

    def _compute(self) -> tuple[SamplingSettings, Tensor] | None:
        """Return the rows' sampling settings and logits, or None if no row is left.

        If a new batch raises, its rows are tried one by one. A row that raises then fails: with
        RequestFailed if another row succeeded, else with its own error.
        """
        try:
            return self._drawable()
        except Exception:  # of any type: one request's error must not fail the others
            rows = self.rows
            broken: dict[_Row, Exception] = {}
            if any(row.logprobs for row in rows):
                raise
            for row in rows:
                self.rows = [row]
                self._cache = None
                try:
                    self._drawable()
                except Exception as error:
                    broken[row] = error
            self.rows = [row for row in rows if row not in broken]
            self._cache = None
            if not broken:
                raise
        for row, error in broken.items():
            row.request.fail(make_request_error(row.request, error) if self.rows else error)
        return self._drawable() if self.rows else None

    def _drawable(self) -> tuple[SamplingSettings, Tensor]:
        samplings = [row.request.sampling for row in self.rows]
        settings = SamplingSettings.from_samplings(samplings, self.vocab_size, self.model.device)
        return settings, self._forward()

    def _keep(self, kept: list[int]) -> None:
        """Drop all rows but `kept`. If that raises, `reset` still returns all of them."""
        if len(kept) == len(self.rows):
            return
        self._mask_NL = self._mask_NL[kept]
        self._next_N = self._next_N[kept]
        if not kept:
            self._cache = None
        elif self._cache is not None:
            self._cache.batch_select_indices(torch.tensor(kept, device=self._mask_NL.device))
        self.rows = [self.rows[i] for i in kept]

    def _forward(self) -> Tensor:
        """Return the logits of each row's next token [N, V], float32 or wider.

        The model's input is the tokens that the cache does not have yet.
        """
        if self._cache is not None:
            feed = torch.tensor([row.tokens[-1:] for row in self.rows], device=self.model.device)
            self._mask_NL = torch.cat(
                [self._mask_NL, self._mask_NL.new_ones(len(self.rows), 1)], dim=1
            )
            out = self._run(feed, self._next_N[:, None])
            self._next_N = self._next_N + 1
        elif self.vision is not None:
            media = [row.request.media for row in self.rows]
            out, self._mask_NL, self._next_N = self.vision.prefill(
                [row.tokens for row in self.rows], media
            )
        else:
            out = self._prefill()
        self._cache = out.past_key_values
        last_NV = out.logits[:, -1]
        return last_NV.to(torch.promote_types(last_NV.dtype, torch.float32), copy=True)

    def _prefill(self) -> Any:
        device = self.model.device
        lengths = [len(row.tokens) for row in self.rows]
        longest = max(lengths)
        feed = torch.tensor(
            [[0] * (longest - len(row.tokens)) + row.tokens for row in self.rows], device=device
        )
        self._next_N = torch.tensor(lengths, device=device)
        self._mask_NL = (
            torch.arange(longest, device=device) >= longest - self._next_N[:, None]
        ).long()
        return self._run(feed, (self._mask_NL.cumsum(-1) - 1).clamp_(min=0))

    def _run(self, feed: Tensor, positions: Tensor) -> Any:
        if self.vision is not None and self.vision.axes > 1:
            positions = positions.expand(self.vision.axes, -1, -1)
        return self.model(
            input_ids=feed,
            attention_mask=self._mask_NL,
            position_ids=positions,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
