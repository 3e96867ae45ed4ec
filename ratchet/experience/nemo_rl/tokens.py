"""Render message logs with tokenizers of Ratchet or of transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol, runtime_checkable

import numpy as np
import tokenizers
import torch
from numpy.typing import NDArray

from ratchet.data.chat.renderer import Renderer
from ratchet.data.chat.tokenizer import Tokenizer
from ratchet.errors import ConfigError
from ratchet.experience.nemo_rl.packed_media import check_media_are_in_content
from ratchet.experience.nemo_rl.specs import DatumSpec, MessageLog, as_message
from ratchet.types import Message, PlacedMedium, StopReason


@runtime_checkable
class HubTokenizer(Protocol):
    """The attributes of a fast tokenizer of `transformers` that Ratchet reads."""

    @property
    def backend_tokenizer(self) -> Any: ...
    @property
    def special_tokens_map(self) -> Mapping[str, Any]: ...
    @property
    def chat_template(self) -> Any: ...


class DecodingTokenizer(Protocol):
    """A tokenizer for functions that only decode answers and render no messages.

    It may have `eos_token_id` and `pad_token_id`, which may be None.
    """

    def batch_decode(self, sequences: Any, *, skip_special_tokens: bool = ...) -> list[str]: ...


# A tokenizer; or a renderer, which a model that reads media needs, with its processor of media.
TokenizerType = Tokenizer | HubTokenizer | Renderer


class LogRenderer(Renderer):
    """A renderer that only appends, because a log is one sequence of tokens.

    Sampled tokens stay as they are, and replies are appended. With any other renderer,
    `EpisodePlayer` begins a new trajectory when the template rewrites earlier turns; a log can't
    hold two trajectories.
    """

    @classmethod
    def from_renderer(cls, renderer: Renderer) -> LogRenderer:
        """Return a log renderer with the tokenizer, template and processor of another renderer."""
        log_renderer = cls.__new__(cls)
        vars(log_renderer).update(vars(renderer))
        return log_renderer

    def keeps_turn(
        self, sampled: Sequence[int], messages: Sequence[Message], **context: Any
    ) -> bool:
        return True


@dataclass(frozen=True)
class AnswerDecoder:
    """A decoder of the policy's answers. Its tokenizer may have no fast backend."""

    stop_ids: tuple[int, ...]
    """The tokens that end an answer."""
    pad_id: int
    """The padding token."""
    decode: Callable[[Sequence[int], StopReason], str]
    """A function that returns the text of an answer's tokens."""


def get_answer_decoder(tokenizer: TokenizerType | DecodingTokenizer) -> AnswerDecoder:
    """Return the decoder of a tokenizer.

    Raises:
        ConfigError: The tokenizer neither is a fast one nor has `batch_decode`.
    """
    has_backend = isinstance(tokenizer, Tokenizer) or hasattr(tokenizer, "backend_tokenizer")
    if has_backend or not hasattr(tokenizer, "batch_decode"):
        fast: Any = tokenizer
        renderer = get_log_renderer(fast)
        return AnswerDecoder(
            renderer.stop_ids,
            renderer.tokenizer.pad_id or 0,
            lambda tokens, stop: renderer.parse(tokens, stop).text,
        )
    decoding: Any = tokenizer
    # A tokenizer of a user need not have these tokens.
    end, pad = (getattr(decoding, f"{name}_token_id", None) for name in ("eos", "pad"))
    return AnswerDecoder(
        () if end is None else (end,),
        pad or 0,
        lambda tokens, _: decoding.batch_decode([list(tokens)], skip_special_tokens=True)[0],
    )


def find_media(
    log: MessageLog, tokens: Sequence[int] | NDArray[np.int64], tokenizer: TokenizerType
) -> tuple[PlacedMedium, ...]:
    """Return the media of a log with their places in its tokens; () for a tokenizer of text.

    Raises DataError if a medium of the log is not in the tokens, or is a PackedTensor alone.
    """
    for entry in log:
        check_media_are_in_content(entry)
    if not isinstance(tokenizer, Renderer) or tokenizer.processor is None:
        return ()
    return tokenizer.media(tokens, [as_message(entry) for entry in log])


@lru_cache(maxsize=8)
def get_log_renderer(tokenizer: TokenizerType) -> LogRenderer:
    """Return a log renderer with the tokenizer's chat template, or that of a renderer.

    If the tokenizer has none, the texts of messages are concatenated.

    Raises:
        ConfigError: The tokenizer is not a fast one.
    """
    if isinstance(tokenizer, Renderer):
        return LogRenderer.from_renderer(tokenizer)
    converted = tokenizer if isinstance(tokenizer, Tokenizer) else _convert(tokenizer)
    return LogRenderer(converted, None if converted.chat_template else "plain")


def _convert(tokenizer: HubTokenizer) -> Tokenizer:
    # Tokenizers written in Python have no backend.
    backend = tokenizer.backend_tokenizer if hasattr(tokenizer, "backend_tokenizer") else None
    if not isinstance(backend, tokenizers.Tokenizer):
        name = type(tokenizer).__name__
        raise ConfigError(
            f"{name} is not a supported tokenizer. Pass a ratchet.data.chat.tokenizer.Tokenizer or "
            "a fast tokenizer of transformers"
        )
    template = tokenizer.chat_template
    return Tokenizer(
        tokenizers.Tokenizer.from_str(backend.to_str()),
        config=dict(tokenizer.special_tokens_map),
        chat_template=template if isinstance(template, str) else None,
    )


def make_datum(
    messages: Sequence[Mapping[str, Any]],
    tokenizer: TokenizerType,
    *,
    idx: int = 0,
    task_name: str = "",
    extra_env_info: dict[str, Any] | None = None,
    stop_strings: list[str] | None = None,
) -> DatumSpec:
    """Return a sample whose prompt is `messages`, rendered by the tokenizer's chat template.

    The last message holds all tokens, because rendered text can't be split by message. For messages
    with media, `tokenizer` is a `Renderer` with the model's processor.
    """
    tokens = get_log_renderer(tokenizer).prompt([as_message(message) for message in messages])
    log: MessageLog = [
        {**message, "token_ids": torch.zeros(0, dtype=torch.int64)} for message in messages
    ]
    log[-1]["token_ids"] = torch.tensor(tokens, dtype=torch.int64)
    return DatumSpec(
        message_log=log,
        length=len(tokens),
        extra_env_info=extra_env_info,
        loss_multiplier=1.0,
        idx=idx,
        task_name=task_name,
        stop_strings=stop_strings,
    )
