"""Translate requests to vLLM, and its outputs to completions."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ratchet.errors import RequestFailed, TrainingError
from ratchet.generators.engine.sampler import derive_stream
from ratchet.generators.faults import find_first_nonfinite
from ratchet.generators.request import GenerationRequest
from ratchet.generators.vllm.lora import has_fused_experts
from ratchet.generators.vllm.media import MediaSettings, collapse_placeholders, make_media_prompt
from ratchet.generators.vllm.structured import make_structured_params
from ratchet.models.layers.expert_routing import UNKNOWN
from ratchet.types import Completion, StopReason


class PartialCompletion:
    """The partial completion of one request, extended by vLLM's outputs.

    Args:
        request: The request.
        sparse_layers: The layers whose experts the completion has as routes.
    """

    def __init__(self, request: GenerationRequest, sparse_layers: Sequence[int] = ()) -> None:
        self.request = request
        self.sparse_layers = list(sparse_layers)
        # Experts of all layers, for every token but the last: [tokens - 1, layers, K].
        self.experts: NDArray[np.unsignedinteger] | None = None
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.log_kept_mass: list[float] = []
        self.stop: StopReason | None = None

    def add(self, piece: Any) -> None:
        """Append new tokens. Tokens after a complete stop string are dropped.

        piece: a `CompletionOutput` with only the new tokens.
        """
        logprobs = piece.logprobs or ()
        for token, entry in (
            zip(piece.token_ids, logprobs, strict=True) if self.stop is None else ()
        ):
            self.tokens.append(token)
            self.logprobs.append(entry[token].logprob)
            if self.request.sampling.has_filters:
                self.log_kept_mass.append(_read_log_kept_mass(entry, token))
            if self.request.stop_strings is not None and self.request.stop_strings.feed(token):
                self.stop = StopReason.STOP_STRING
                break
        if self.request.sampling.routes and piece.finish_reason is not None:
            self.experts = piece.routed_experts
        # vLLM versions that check the limit before the stop tokens report "length" for a stop
        # token at the limit.
        has_ended = piece.finish_reason in ("stop", "length")
        if has_ended and self.tokens and self.tokens[-1] in self.request.sampling.stop_ids:
            self.stop = StopReason.STOP_TOKEN
        elif piece.finish_reason is not None and self.stop is None:
            self.stop = self._get_stop_reason(piece.finish_reason)

    def _get_stop_reason(self, finish_reason: str) -> StopReason:
        if finish_reason == "length":
            return self.request.reason_at_limit
        if finish_reason == "abort":
            return StopReason.ABORTED
        raise TrainingError(f"vLLM ended a request with '{finish_reason}': its log says why")

    def build_completion(self) -> Completion:
        """Return the completion of an ended request.

        Raises RequestFailed if its logits weren't finite.
        """
        assert self.stop is not None, "the request has not ended"
        logprobs = np.array(self.logprobs, dtype=np.float32)
        completion = self.request.complete(
            np.array(self.tokens, dtype=np.int64),
            logprobs,
            np.array(self.log_kept_mass, dtype=np.float32)
            if self.request.sampling.has_filters
            else None,
            self.stop,
            self._collect_routes() if self.request.sampling.routes else None,
        )
        if (index := find_first_nonfinite(logprobs)) is not None:
            raise RequestFailed(
                f"vLLM's logits of a request aren't finite (token {index}, weights version "
                f"{completion.versions[index]}). Leave this prompt out. If every request fails "
                "like this, go back to the last checkpoint."
            )
        return completion

    def _collect_routes(self) -> NDArray[np.int16] | None:
        """Return the experts of prompt and completion, [tokens, sparse layers, K].

        The last token has none (`UNKNOWN`). Return None for a request that was aborted before its
        first token. Raises RequestFailed if vLLM returned the experts of too few tokens.
        """
        length = len(self.request.prompt) + len(self.tokens)
        if self.experts is None and not self.tokens:
            return None
        n_known = 0 if self.experts is None else len(self.experts)
        if self.experts is None or n_known < length - 1:
            raise RequestFailed(
                f"vLLM returned the experts of {n_known} of {length - 1} tokens. Set "
                "algorithm.router.replay=false if every request fails like this."
            )
        # Tokens after a stop string are dropped, so there may be more experts than tokens.
        recorded_routes = self.experts[: length - 1, self.sparse_layers]
        routes = np.full((length, *recorded_routes.shape[1:]), UNKNOWN, dtype=np.int16)
        routes[:-1] = recorded_routes
        return routes


def _read_log_kept_mass(entry: Mapping[int, Any], token: int) -> float:
    """Return the log of the mass that the filters kept, from a token's two logprobs.

    entry: the token's logprob before filters, under its own id, and its logprob after filters,
      stored under another id (see `ratchet.generators.vllm.sampler`).
    """
    filtered = next(other.logprob for id, other in entry.items() if id != token)
    return min(entry[token].logprob - filtered, 0.0)  # rounding may give more than 0


def make_sampling_params(request: GenerationRequest, *, streams: bool) -> Any:
    """Return vLLM's `SamplingParams` of a request.

    streams: True delivers tokens as they are drawn, False all at the end.
    """
    params = import_module("vllm.sampling_params")
    sampling = request.sampling
    return params.SamplingParams(
        temperature=sampling.temperature,
        # A continued completion gets a new stream, by the number of tokens that it already has.
        seed=derive_stream(sampling.seed, sampling.drawn) % 2**63,
        max_tokens=request.limit - len(request.prompt),
        stop_token_ids=list(sampling.stop_ids),
        ignore_eos=True,  # the caller names every id that ends a completion
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        # 0: only the logprob of the sampled token. 1: a second one, after the filters
        # (`ratchet.generators.vllm.sampler`).
        logprobs=int(sampling.has_filters),
        detokenize=False,
        structured_outputs=make_structured_params(sampling.structured),
        output_kind=params.RequestOutputKind.DELTA
        if streams
        else params.RequestOutputKind.FINAL_ONLY,
    )


class LoRARequests(dict[str | None, Any]):
    """A table of vLLM's `LoRARequest`s by `Sampling.adapter`; None: the policy's adapter."""

    def __init__(self) -> None:
        super().__init__()
        self._numbers = itertools.count(2)  # 1 is the policy's

    def make_factory(self, path: str, name: str | None) -> Callable[..., Any]:
        """Return a factory of the `LoRARequest` of an adapter in a directory.

        If the factory is called with `load_inplace=True`, its request replaces the loaded adapter
        of the same number.
        """
        number = 1 if name is None else next(self._numbers)
        return partial(
            import_module("vllm.lora.request").LoRARequest,
            f"adapter {number}",
            number,
            path,
            is_3d_lora_weight=has_fused_experts(Path(path)),
        )


def make_vllm_prompt(
    request: GenerationRequest, version: int, media_settings: MediaSettings
) -> dict[str, Any]:
    """Return vLLM's prompt of a request.

    Its salt holds the version: vLLM shares prefix-cache blocks among requests of equal salt, so no
    request reads keys computed with other weights.
    """
    salt = f"weights {version}"
    return {
        "prompt_token_ids": collapse_placeholders(request, media_settings),
        "cache_salt": salt,
        **make_media_prompt(request, salt, media_settings),
    }
