"""Generate with any causal language model of transformers, in one padded batch after another.

The KV cache is that of transformers. A model that reads images, audio or videos gets the prompts'
media in the prefill.

This generator serves models that the embedded engine can't run. It is slower (padding, no
continuous batching, no shared prompts). With equal weights and seeds, this generator and the engine
give equal tokens, except where logits differ in their last bits.

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
from ratchet.generators.engine.sampler import SamplingSettings, draw_tokens, draw_uniforms
from ratchet.generators.engine.stop_strings import TextDecoder
from ratchet.generators.faults import explain_nonfinite, make_request_error
from ratchet.generators.grammar_masks import BatchMasks
from ratchet.generators.request import GenerationRequest
from ratchet.models.decoder import Decoder
from ratchet.models.policy import DecoderPolicy, PolicyModel
from ratchet.models.transformers_settings import read_max_positions
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
        transformers_model: Any = (
            _get_transformers_model(model) if isinstance(model, PolicyModel) else model
        )
        text_config = transformers_model.config.get_text_config()
        positions = read_max_positions(text_config) or config.max_context
        if positions is None:
            raise ModelError(
                f"{type(transformers_model).__name__} doesn't name its longest context: set "
                "generator.max_context"
            )
        vocab_size = transformers_model.get_output_embeddings().weight.shape[0]
        weights = (
            model.canonical_weights
            if isinstance(model, PolicyModel)
            else partial(_list_named_weights, transformers_model)
        )
        media_policy: Any = model if isinstance(model, PolicyModel) and model.reads_media else None
        super().__init__(
            PaddedBatches(
                transformers_model,
                max_running=config.max_running,
                vocab_size=vocab_size,
                media_policy=media_policy,
            ),
            weights,
            transformers_model.parameters,
            tokenizer,
            vocab_size=vocab_size,
            max_context=min(config.max_context or positions, positions),
            keep_kv=config.keep_kv,
            policy=model if isinstance(model, PolicyModel) else None,
            reads_media=media_policy is not None,
        )


def _get_transformers_model(policy: PolicyModel) -> Any:
    # The class is not imported at run time, because its module imports transformers.
    transformers_policy: TransformersPolicy = policy  # pyright: ignore[reportAssignmentType]
    return transformers_policy.model


def _list_named_weights(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [(name, parameter.detach()) for name, parameter in model.named_parameters()]


class _Row:
    """A running request: its sequence so far, and the values recorded for its new tokens."""

    def __init__(self, request: GenerationRequest) -> None:
        self.request = request
        self.tokens: list[int] = request.prompt.tolist()
        self.logprobs: list[float] = []
        self.log_kept: list[float] = []

    def add(self, token: int, logprob: float, log_kept: float) -> StopReason | RequestFailed | None:
        """Append a token. Return the reason if the completion has ended, else None.

        If the tokenizer can't decode the text, or the grammar can't be followed, the request's
        error is returned.
        """
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.log_kept.append(log_kept)
        request = self.request
        try:
            matched = request.stop_strings is not None and request.stop_strings.feed(token)
        except RequestFailed as error:
            return error
        if token in request.sampling.stop_ids:
            return StopReason.STOP_TOKEN
        if matched:
            return StopReason.STOP_STRING
        if len(self.tokens) == request.limit:
            return request.reason_at_limit
        if request.grammar is not None:
            try:
                request.grammar.feed(token)
            except RequestFailed as error:
                return error
        return None

    def deliver(self, stop: StopReason) -> None:
        new_tokens = np.array(self.tokens[len(self.request.prompt) :], dtype=np.int64)
        logprobs, log_kept = (
            np.array(column, dtype=np.float32) for column in (self.logprobs, self.log_kept)
        )
        self.request.deliver(self.request.complete(new_tokens, logprobs, log_kept, stop))


class PaddedBatches:
    """An `EngineCore` that runs waiting requests as a batch, padded on the left.

    Rows leave the batch when they end; the next batch starts when all have left.

    media_policy: the policy around a model that reads media; None: the model reads only text.
    """

    def __init__(
        self,
        model: Any,
        *,
        max_running: int,
        vocab_size: int,
        media_policy: MultimodalPolicy | None = None,
    ) -> None:
        self.model = model
        self.max_running = max_running
        self.vocab_size = vocab_size
        self.media_policy = media_policy
        self.waiting: deque[GenerationRequest] = deque()
        self.rows: list[_Row] = []
        self.version = 0
        # transformers' KV cache of all rows; None: it must be computed (prefill).
        self._cache: Any = None
        self._mask_NL = torch.zeros(0, 0, dtype=torch.int64)
        # Position of the next input token, the same in all axes of an M-RoPE.
        self._next_positions_N = torch.zeros(0, dtype=torch.int64)

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.rows)

    def add(self, request: GenerationRequest) -> None:
        self.waiting.append(request)

    def cancel(self, request: GenerationRequest) -> None:
        if request in self.waiting:
            self.waiting.remove(request)
        self._keep_rows([i for i, row in enumerate(self.rows) if row.request is not request])

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
            row.request.version_starts.append((len(row.logprobs), version))

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
                row.request.version_starts.append((0, self.version))
        was_training = self.model.training
        # In training mode transformers applies dropout, and with activation checkpointing it
        # fills no cache.
        self.model.eval()
        try:
            settings_and_logits = self._compute_or_fail_rows()
        finally:
            self.model.train(was_training)
        if settings_and_logits is None:
            return
        settings, logits_NV = settings_and_logits
        device = logits_NV.device
        index_N = torch.tensor([len(row.logprobs) for row in self.rows], device=device)
        masks = BatchMasks.compute([row.request.grammar for row in self.rows], self.vocab_size)
        if masks is not None:
            masks.apply(logits_NV)
        sampled = draw_tokens(logits_NV, draw_uniforms(settings.streams_N, index_N), settings)
        finite_N = sampled.logprobs_N.isfinite()
        errors: dict[GenerationRequest, Exception] = {
            self.rows[i].request: error for i, error in (masks.errors if masks else {}).items()
        }
        errors |= {} if finite_N.all() else self._explain_errors(finite_N)
        log_kept_N = torch.zeros_like(sampled.logprobs_N)
        if settings.filters is not None and sampled.log_kept_F is not None:
            log_kept_N[settings.filters.rows_F] = sampled.log_kept_F.to(log_kept_N.dtype)
        columns = zip(
            sampled.tokens_N.tolist(), sampled.logprobs_N.tolist(), log_kept_N.tolist(), strict=True
        )
        reasons = [
            errors.get(row.request) or row.add(*column)
            for row, column in zip(self.rows, columns, strict=True)
        ]
        ended_rows = [
            (row, reason)
            for row, reason in zip(self.rows, reasons, strict=True)
            if reason is not None
        ]
        self._keep_rows([i for i, reason in enumerate(reasons) if reason is None])
        for row, reason in ended_rows:
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
            broken, all_fail=len(broken) == len(self.rows), weights=weights, version=self.version
        )

    def _compute_or_fail_rows(self) -> tuple[SamplingSettings, Tensor] | None:
        """Return the rows' sampling settings and logits, or None if no row is left.

        If the prefill of a batch raises, each row is computed alone, and rows that raise again
        fail. Their error is RequestFailed if another row succeeded, else their own error.
        """
        try:
            return self._compute_logits()
        except Exception:  # of any type: one request's error must not fail the others
            rows = self.rows
            broken: dict[_Row, Exception] = {}
            if any(row.logprobs for row in rows):
                raise
            for row in rows:
                self.rows = [row]
                self._cache = None
                try:
                    self._compute_logits()
                except Exception as error:
                    broken[row] = error
            self.rows = [row for row in rows if row not in broken]
            self._cache = None
            if not broken:
                raise
        for row, error in broken.items():
            row.request.fail(make_request_error(row.request, error) if self.rows else error)
        return self._compute_logits() if self.rows else None

    def _compute_logits(self) -> tuple[SamplingSettings, Tensor]:
        """Return the rows' sampling settings and the logits of their next tokens, [N, V]."""
        samplings = [row.request.sampling for row in self.rows]
        settings = SamplingSettings.from_samplings(samplings, self.vocab_size, self.model.device)
        return settings, self._forward()

    def _keep_rows(self, row_indices: list[int]) -> None:
        """Drop all rows but `row_indices`. If that raises, `reset` still returns all of them."""
        if len(row_indices) == len(self.rows):
            return
        self._mask_NL = self._mask_NL[row_indices]
        self._next_positions_N = self._next_positions_N[row_indices]
        if not row_indices:
            self._cache = None
        elif self._cache is not None:
            self._cache.batch_select_indices(torch.tensor(row_indices, device=self._mask_NL.device))
        self.rows = [self.rows[i] for i in row_indices]

    def _forward(self) -> Tensor:
        """Return the logits of each row's next token [N, V], float32 or wider.

        The model's input is the tokens that the cache does not have yet.
        """
        if self._cache is not None:
            input_ids = torch.tensor(
                [row.tokens[-1:] for row in self.rows], device=self.model.device
            )
            self._mask_NL = torch.cat(
                [self._mask_NL, self._mask_NL.new_ones(len(self.rows), 1)], dim=1
            )
            output = self._run(input_ids, self._next_positions_N[:, None])
            self._next_positions_N = self._next_positions_N + 1
        elif self.media_policy is not None:
            media = [row.request.media for row in self.rows]
            output, self._mask_NL, self._next_positions_N = self.media_policy.prefill(
                [row.tokens for row in self.rows], media
            )
        else:
            output = self._prefill()
        self._cache = output.past_key_values
        last_NV = output.logits[:, -1]
        return last_NV.to(torch.promote_types(last_NV.dtype, torch.float32), copy=True)

    def _prefill(self) -> Any:
        device = self.model.device
        lengths = [len(row.tokens) for row in self.rows]
        longest = max(lengths)
        input_ids = torch.tensor(
            [[0] * (longest - len(row.tokens)) + row.tokens for row in self.rows], device=device
        )
        self._next_positions_N = torch.tensor(lengths, device=device)
        self._mask_NL = (
            torch.arange(longest, device=device) >= longest - self._next_positions_N[:, None]
        ).long()
        return self._run(input_ids, (self._mask_NL.cumsum(-1) - 1).clamp_(min=0))

    def _run(self, input_ids: Tensor, positions: Tensor) -> Any:
        if self.media_policy is not None and self.media_policy.axes > 1:
            positions = positions.expand(self.media_policy.axes, -1, -1)
        return self.model(
            input_ids=input_ids,
            attention_mask=self._mask_NL,
            position_ids=positions,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
