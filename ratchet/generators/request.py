"""Define generation requests, their validation, and the protocol of the cores that run them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ratchet.errors import ConfigError, DataError
from ratchet.generators.engine.stop_strings import StopStrings, TextDecoder
from ratchet.generators.grammar_masks import GrammarCompiler, GrammarMatcher
from ratchet.types import Completion, PlacedMedium, Sampling, StopReason

PromptKey = tuple[bytes, tuple[tuple[int, str], ...]]


def make_prompt_key(tokens: NDArray[np.int64], media: Sequence[PlacedMedium]) -> PromptKey:
    """Return a key that is equal for equal prompts.

    The key contains the media, because the placeholder tokens of all images are the same.
    """
    return tokens.tobytes(), tuple((start, medium.key) for start, medium in media)


@dataclass(eq=False)
class GenerationRequest:
    """A request that a core runs.

    Exactly one of `deliver` and `fail` is called, once, unless the request is cancelled.
    """

    prompt: NDArray[np.int64]
    """int64, at least one token."""
    sampling: Sampling
    limit: int
    """maximum length of the sequence, prompt included; longer than the prompt."""
    deliver: Callable[[Completion], None]
    fail: Callable[[BaseException], None]
    stop_strings: StopStrings | None = None
    """the detector of stop strings, if the sampling has any."""
    media: tuple[PlacedMedium, ...] = ()
    """media of the prompt, in order."""
    grammar: GrammarMatcher | None = None
    """the matcher of the sampling's grammar, if this process restricts the tokens."""
    # Equal for equal prompts that the same adapter serves.
    key: tuple[str | None, PromptKey] = field(init=False)
    # (number of new tokens so far, version of the weights that draw the next ones)
    version_starts: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.key = self.sampling.adapter, make_prompt_key(self.prompt, self.media)

    @property
    def reason_at_limit(self) -> StopReason:
        """Return the reason why a sequence ends at `limit`: `max_new_tokens` or the context."""
        is_token_limit = self.limit == len(self.prompt) + self.sampling.max_new_tokens
        return StopReason.LENGTH if is_token_limit else StopReason.CONTEXT

    def complete(
        self,
        tokens: NDArray[np.int64],
        logprobs: NDArray[np.float32],
        log_kept_mass: NDArray[np.float32] | None,
        stop: StopReason,
        routes: NDArray[np.int16] | None = None,
    ) -> Completion:
        """Return the completion. log_kept_mass: None without sampling filters."""
        log_kept = (
            np.zeros(len(tokens), dtype=np.float32) if log_kept_mass is None else log_kept_mass
        )
        return Completion(
            tokens,
            logprobs,
            log_kept,
            self._expand_versions(len(tokens)),
            stop,
            routes,
            allowed=self.grammar and self.grammar.make_allowed(len(tokens)),
        )

    def without_tokens(self, stop: StopReason) -> Completion:
        """Return an empty completion."""
        return self.complete(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.float32), None, stop)

    def _expand_versions(self, count: int) -> NDArray[np.int32]:
        versions = np.empty(count, dtype=np.int32)
        for start, version in self.version_starts:
            versions[start:] = version
        return versions


@dataclass(frozen=True)
class RequestValidator:
    """The checks that every prompt and sampling must pass."""

    vocab_size: int
    max_context: int
    tokenizer: TextDecoder | None
    """needed only for requests with stop strings."""
    records_routes: bool = False
    """True if `Sampling.routes` is supported."""
    adapters: Callable[[], Sequence[str]] = list
    """returns the names that `Sampling.adapter` may have."""
    reads_media: bool = False
    """True if the model reads media."""
    grammars: GrammarCompiler | None = None
    """compiles `Sampling.structured`; None: no request may have it."""
    passes_grammars: bool = False
    """True if the core itself follows grammars."""

    def admit(
        self,
        tokens: Sequence[int] | NDArray[np.int64],
        sampling: Sampling,
        deliver: Callable[[Completion], None],
        fail: Callable[[BaseException], None],
        media: Sequence[PlacedMedium] = (),
    ) -> GenerationRequest:
        """Return the checked request.

        Raises:
            DataError: The prompt is empty or too long, has unknown tokens or misplaced media, or
                has no token besides the `sampling.drawn` ones, which belong to the completion.
            ConfigError: This generator can't apply the sampling settings or read the media.
            MissingDependency: The package for `sampling.structured` is missing.
            RequestFailed: The grammar does not allow the `sampling.drawn` tokens, or the tokenizer
                can't decode them for stop strings.
        """
        prompt = _to_token_array(tokens)
        if len(prompt) > self.max_context:
            raise DataError(
                f"a prompt of {len(prompt)} tokens doesn't fit a context of {self.max_context}: "
                "shorten or drop the prompt"
            )
        if prompt.view(np.uint64).max() >= self.vocab_size:  # a negative id becomes a huge one
            unknown_token = next(
                token for token in prompt.tolist() if not 0 <= token < self.vocab_size
            )
            raise DataError(
                f"token {unknown_token} isn't in the model's vocabulary of {self.vocab_size}. Use "
                "the model's own tokenizer"
            )
        self._check_media(prompt, media)
        if sampling.routes and not self.records_routes:
            raise ConfigError(
                "sampling.routes is set, but this generator records no routes. The engine does "
                "with a mixture of experts, and vLLM with arguments.enable_return_routed_experts"
            )
        if sampling.adapter is not None and sampling.adapter not in (names := self.adapters()):
            served_text = (
                f"it serves {', '.join(names)}"
                if names
                else "it serves only the policy's own adapter. Set generator.kind=engine"
            )
            raise ConfigError(f"the generator has no adapter '{sampling.adapter}': {served_text}")
        if sampling.drawn >= len(prompt):
            raise DataError(
                f"sampling.drawn={sampling.drawn} leaves no prompt, because the prompt has only "
                f"{len(prompt)} tokens. Set sampling.drawn=0."
            )
        drawn = prompt[len(prompt) - sampling.drawn :].tolist()
        stop_strings = self._start_stop_strings(sampling, drawn)
        grammar = self._start_grammar(sampling, drawn)
        limit = min(len(prompt) + sampling.max_new_tokens, self.max_context)
        return GenerationRequest(
            prompt, sampling, limit, deliver, fail, stop_strings, tuple(media), grammar
        )

    async def compile_grammar(self, sampling: Sampling) -> None:
        """Compile the grammar of a request, if it has one, while the event loop goes on.

        Raises ConfigError for a grammar that can't be followed, and MissingDependency.
        """
        if sampling.structured is not None and self.grammars is not None:
            await self.grammars.compile(sampling.structured)

    def _start_stop_strings(self, sampling: Sampling, drawn: Sequence[int]) -> StopStrings | None:
        if not sampling.stop:
            return None
        if self.tokenizer is None:
            raise ConfigError(
                "sampling.stop has strings, but the generator has no tokenizer: give it one, or "
                "use stop_ids"
            )
        stop_strings = StopStrings(sampling.stop, self.tokenizer)
        for token in drawn:
            stop_strings.feed(token)
        return stop_strings

    def _start_grammar(self, sampling: Sampling, drawn: Sequence[int]) -> GrammarMatcher | None:
        if sampling.structured is None or self.passes_grammars:
            return None
        if self.grammars is None:
            raise ConfigError(
                "sampling.structured needs the model's tokenizer, and the generator has none. Give "
                "it a tokenizer of ratchet.data.chat.tokenizer."
            )
        return self.grammars.start(sampling.structured, sampling.stop_ids, drawn)

    def _check_media(self, prompt: NDArray[np.int64], media: Sequence[PlacedMedium]) -> None:
        if media and not self.reads_media:
            raise ConfigError(
                f"the prompt has {len(media)} media (the first is of kind {media[0].medium.kind}), "
                "and this generator reads only text: set generator.kind to hf or vllm, with a "
                "model that reads media"
            )
        end = 0
        for start, medium in media:
            if start < end or start + medium.span > len(prompt):
                raise DataError(
                    f"a medium ({medium.kind}) is at tokens {start} to {start + medium.span} of a "
                    f"prompt of {len(prompt)}: it lies outside or overlaps another. Pass media in "
                    "order, with the tokens that they were rendered with"
                )
            end = start + medium.span


def _to_token_array(tokens: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
    """Return a copy of a prompt. Raises DataError if it is empty or not a sequence of integers."""
    try:
        array = np.asarray(tokens)
        if array.dtype.kind not in "iu" and len(array):
            raise TypeError(f"their type is {array.dtype}")
        prompt = np.array(array, dtype=np.int64)
    except (TypeError, ValueError, OverflowError) as error:
        raise DataError(
            f"a prompt is not a sequence of token ids ({error}). Pass integers, as a tokenizer "
            "returns them."
        ) from None
    if prompt.ndim != 1:
        raise DataError(
            f"a prompt has the shape {list(prompt.shape)}. Pass one sequence of token ids."
        )
    if not len(prompt):
        raise DataError(
            "the prompt is empty. Pass at least one token, such as BOS, for the first new token to "
            "follow"
        )
    return prompt


class EngineCore(Protocol):
    """The engine that `AsyncEngine` drives.

    The core owns a request from `add` until it delivers, fails, cancels or returns the request.
    """

    @property
    def version(self) -> int: ...
    @property
    def busy(self) -> bool: ...
    def add(self, request: GenerationRequest) -> None: ...
    def cancel(self, request: GenerationRequest) -> None:
        """Remove a waiting or running request; do nothing if it has already been delivered."""
        ...

    def abort(self) -> None:
        """End all requests; they return their partial completions."""
        ...

    def step(self) -> None:
        """Let waiting requests enter, or compute a new token for every running request."""
        ...

    def commit(self, version: int, *, keep_kv: bool) -> None:
        """Set the version of the tokens drawn from now on, after the weights have changed.

        keep_kv: True if the KV cache of the old weights stays in use.
        """
        ...

    def reset(self) -> list[GenerationRequest]:
        """Drop all state, which can't be trusted after an error; return the open requests."""
        ...
