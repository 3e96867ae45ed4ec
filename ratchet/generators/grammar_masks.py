"""Restrict sampled tokens to those that a grammar allows, with llguidance (structured output).

Masks are computed on the CPU, those of several requests in parallel. A request without a grammar
costs nothing.

N = requests of a batch, R = those with a grammar, B = bytes of a mask, V = vocabulary.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import tokenizers
import torch
from numpy.typing import NDArray
from torch import Tensor

from ratchet.allowed_tokens import AllowedTokens, unpack_masks
from ratchet.data.chat.tokenizer import Tokenizer
from ratchet.errors import ConfigError, DataError, RequestFailed
from ratchet.structured_output import MAX_COMPILED, StructuredOutput

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

NO_CONTINUATION = "no token of the tokenizer can continue the completion"


class GrammarCompiler:
    """A compiler of grammars for one model and its tokenizer.

    vocab_size: number of the model's logits, which may exceed the tokenizer's number of tokens.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self._ll_tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[StructuredOutput, LLMatcher] = OrderedDict()
        self._compiling: dict[StructuredOutput, asyncio.Task[None]] = {}

    async def compile(self, structured: StructuredOutput) -> None:
        """Compile a grammar for `start`, in a thread: the event loop goes on meanwhile.

        A compiled grammar returns at once. Requests with one grammar wait for one compilation.

        Raises:
            MissingDependency: llguidance is not installed.
            ConfigError: llguidance refuses the grammar or the tokenizer.
        """
        if structured in self._compiled:
            return
        compiling = self._compiling.get(structured)
        if compiling is None:
            compiling = asyncio.create_task(self._compile_in_thread(structured))
            self._compiling[structured] = compiling
        await asyncio.shield(compiling)

    async def _compile_in_thread(self, structured: StructuredOutput) -> None:
        # llguidance releases the GIL while it compiles.
        try:
            self._keep(structured, await asyncio.to_thread(self._compile, structured))
        finally:
            del self._compiling[structured]

    def _keep(self, structured: StructuredOutput, prototype: LLMatcher) -> None:
        self._compiled[structured] = prototype
        if len(self._compiled) > MAX_COMPILED:
            self._compiled.popitem(last=False)

    def start(
        self, structured: StructuredOutput, stop_ids: Sequence[int], drawn: Sequence[int]
    ) -> GrammarMatcher:
        """Return the matcher of a new completion.

        Args:
            stop_ids: tokens that end the completion once it fulfils the grammar.
            drawn: tokens of the completion that earlier requests have drawn.

        Raises:
            MissingDependency: llguidance is not installed.
            ConfigError: llguidance refuses the grammar or the tokenizer, or there are no stop ids.
            RequestFailed: The grammar does not allow the drawn tokens.
        """
        if not stop_ids:
            raise ConfigError(
                "sampling.structured needs a token that ends the completion once it is complete. "
                "Set sampling.stop_ids to the tokenizer's EOS."
            )
        prototype = self._compiled.get(structured)
        if prototype is None:
            prototype = self._compile(structured)
            self._keep(structured, prototype)
        self._compiled.move_to_end(structured)
        matcher = GrammarMatcher(
            prototype.deep_copy(), stop_ids, self.tokenizer.eos_ids, self.vocab_size
        )
        for token in drawn:
            matcher.feed(token)
        return matcher

    def _compile(self, structured: StructuredOutput) -> LLMatcher:
        grammar = structured.compile()
        from llguidance import LLMatcher, LLParserLimits

        if self._ll_tokenizer is None:
            self._ll_tokenizer = _convert_tokenizer(self.tokenizer, self.vocab_size)
        limits = LLParserLimits(verbose_errors=False)
        matcher = LLMatcher(self._ll_tokenizer, grammar, log_level=0, limits=limits)
        if matcher.is_error():
            raise ConfigError(
                f"sampling.structured can't be followed: {matcher.get_error():.500}. Correct or "
                "simplify it."
            )
        return matcher


def _convert_tokenizer(tokenizer: Tokenizer, vocab_size: int) -> LLTokenizer:
    """Return llguidance's form of a tokenizer. Raises ConfigError if it has none."""
    from llguidance import LLTokenizer, TokenizerWrapper

    if not tokenizer.eos_ids:
        raise ConfigError(
            "sampling.structured needs a tokenizer with an EOS token, and this one has none. Name "
            "its eos_token in tokenizer_config.json."
        )
    text = tokenizer.to_json()
    try:
        return LLTokenizer(text, n_vocab=vocab_size, eos_token=list(tokenizer.eos_ids))
    except ValueError as error:
        backend = tokenizers.Tokenizer.from_str(text)
        # llguidance does not know decoders that only join the tokens' texts.
        if type(backend.decoder).__name__ not in ("NoneType", "Fuse"):
            raise ConfigError(
                f"sampling.structured: llguidance can't read this tokenizer ({error}). Leave "
                "structured out, or use a model with a byte-level tokenizer."
            ) from error
    token_bytes = [b""] * vocab_size
    for token, i in backend.get_vocab(with_added_tokens=True).items():
        token_bytes[i] = token.encode()
    plain_tokenizer = _PlainTokenizer(
        tokenizer, tokenizer.eos_ids[0], token_bytes, list(tokenizer.special_ids.values())
    )
    return LLTokenizer(
        TokenizerWrapper(plain_tokenizer), n_vocab=vocab_size, eos_token=list(tokenizer.eos_ids)
    )


@dataclass(frozen=True)
class _PlainTokenizer:
    """A tokenizer whose tokens are texts, with the attributes that llguidance reads."""

    tokenizer: Tokenizer
    eos_token_id: int
    tokens: Sequence[bytes]
    special_token_ids: Sequence[int]
    bos_token_id: int | None = None

    def __call__(self, text: bytes) -> list[int]:
        """Return the tokens of a text that a grammar forces; [] if it can't be written."""
        try:
            return self.tokenizer.encode(text.decode())
        except (DataError, UnicodeDecodeError):
            return []


class GrammarMatcher:
    """The state of one completion under its grammar, fed token by token.

    It records the mask of each token for `Completion.allowed`.
    """

    def __init__(
        self, matcher: LLMatcher, stop_ids: Sequence[int], eos_ids: Sequence[int], vocab_size: int
    ) -> None:
        self.matcher = matcher
        # llguidance allows the tokenizer's EOS tokens where the completion may end.
        self._unused_eos_ids = [i for i in eos_ids if i not in stop_ids]
        self._stop_ids = [i for i in stop_ids if i < vocab_size]
        self._row_by_mask: dict[bytes, int] = {}
        self._index: list[int] = []

    def finish_mask(self, mask_B: NDArray[np.uint8]) -> None:
        """Correct and record llguidance's mask of the next token, in place.

        Stop ids are allowed exactly where the completion may end, and no other EOS token is. Raises
        RequestFailed if no token is allowed.
        """
        if self.matcher.is_error():
            raise self._make_error(self.matcher.get_error())
        is_complete = self.matcher.is_accepting()
        for token in (*self._unused_eos_ids, *self._stop_ids):
            bit = np.uint8(1 << token % 8)
            if is_complete and token in self._stop_ids:
                mask_B[token // 8] |= bit
            else:
                mask_B[token // 8] &= ~bit
        if not mask_B.any():
            raise self._make_error(NO_CONTINUATION)
        mask = mask_B.tobytes()
        self._index.append(self._row_by_mask.setdefault(mask, len(self._row_by_mask)))

    def feed(self, token: int) -> None:
        """Add a drawn token that does not end the completion.

        Raises RequestFailed if the grammar does not allow it.
        """
        if not self.matcher.consume_token(token):
            raise self._make_error(self.matcher.get_error() or f"token {token} is not allowed")

    def _make_error(self, reason: str) -> RequestFailed:
        if reason.startswith("NoExtension"):
            reason = NO_CONTINUATION
        return RequestFailed(
            f"sampling.structured can't be followed after {len(self._index)} tokens: "
            f"{reason.strip():.500}. Simplify the grammar."
        )

    def make_allowed(self, count: int) -> AllowedTokens | None:
        """Return the masks of the first `count` tokens; None if there are none."""
        if not count:
            return None
        index = np.asarray(self._index[:count], np.int32)
        masks = np.frombuffer(b"".join(self._row_by_mask), np.uint8)
        return AllowedTokens(index, masks.reshape(len(self._row_by_mask), -1))


@dataclass(frozen=True)
class BatchMasks:
    """The masks of the requests of a batch that have a grammar, for their next tokens.

    errors: by row; a row whose grammar can't be followed. All its tokens are allowed, and what it
        draws is dropped.
    """

    rows: NDArray[np.int64]  # [R], ascending
    masks_RB: NDArray[np.uint8]
    errors: dict[int, RequestFailed]

    @classmethod
    def compute(
        cls, matchers: Sequence[GrammarMatcher | None], vocab_size: int
    ) -> BatchMasks | None:
        """Return the masks of N requests; None if none has a grammar."""
        constrained = [(row, m) for row, m in enumerate(matchers) if m is not None]
        if not constrained:
            return None
        words = np.zeros((len(constrained), -(-vocab_size // 32)), np.int32)
        _fill_masks([matcher.matcher for _, matcher in constrained], words)
        masks_RB = words.view(np.uint8)
        errors: dict[int, RequestFailed] = {}
        for (row, matcher), mask_B in zip(constrained, masks_RB, strict=True):
            try:
                matcher.finish_mask(mask_B)
            except RequestFailed as error:
                errors[row] = error
                mask_B[:] = 255
        return cls(np.asarray([row for row, _ in constrained]), masks_RB, errors)

    def apply(self, logits_NV: Tensor, first_row: int = 0) -> None:
        """Set the logits of tokens that are not allowed to -inf, in place.

        logits_NV: those of the rows from `first_row` on.
        """
        chunk = (self.rows >= first_row) & (self.rows < first_row + len(logits_NV))
        if not chunk.any():
            return
        device = logits_NV.device
        rows = torch.from_numpy(self.rows[chunk] - first_row).to(device)
        masks_RB = torch.from_numpy(self.masks_RB[chunk]).to(device)
        allowed_RV = unpack_masks(masks_RB, logits_NV.shape[1])
        logits_NV[rows] = logits_NV[rows].masked_fill(~allowed_RV, -torch.inf)


_executor: Any = None  # llguidance's threads, started with the first batch of several grammars


def _fill_masks(matchers: Sequence[LLMatcher], words_RW: NDArray[np.int32]) -> None:
    """Write the bits of the next token's mask of each matcher into a row of 32-bit words."""
    global _executor
    from llguidance import LLExecutor
    from llguidance.numpy import fill_next_token_bitmask, fill_next_token_bitmask_par

    if len(matchers) == 1:
        fill_next_token_bitmask(matchers[0], words_RW, 0)
        return
    if _executor is None:
        _executor = LLExecutor()
    pairs = [(matcher, row) for row, matcher in enumerate(matchers)]
    fill_next_token_bitmask_par(_executor, pairs, words_RW)
