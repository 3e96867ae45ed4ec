"""The renderer of a message log, whichever library its tokenizer is of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Protocol, runtime_checkable

import tokenizers
import torch

from ratchet.data.chat.renderer import Renderer
from ratchet.data.chat.tokenizer import Tokenizer
from ratchet.errors import ConfigError
from ratchet.experience.nemo_rl.specs import DatumSpec, MessageLog, as_message
from ratchet.types import Message


@runtime_checkable
class HubTokenizer(Protocol):
    """What is read of a fast tokenizer of `transformers`."""

    @property
    def backend_tokenizer(self) -> Any: ...
    @property
    def special_tokens_map(self) -> Mapping[str, Any]: ...


TokenizerType = Tokenizer | HubTokenizer


class LogRenderer(Renderer):
    """A log is one sequence of tokens: what was said stays as it was sampled, and whatever answers
    it is appended. (The training loop would begin a new trajectory where the template rewrites
    earlier turns; a log can't.)"""

    def keeps(self, sampled: Sequence[int], messages: Sequence[Message], **context: Any) -> bool:
        return True


@lru_cache(maxsize=8)
def renderer_of(tokenizer: TokenizerType) -> LogRenderer:
    """With the tokenizer's own chat template; without one, messages are put end to end, each its
    own text.

    Raises ConfigError for a tokenizer that is not a fast one.
    """
    own = tokenizer if isinstance(tokenizer, Tokenizer) else _converted(tokenizer)
    return LogRenderer(own, None if own.chat_template else "plain")


def _converted(tokenizer: HubTokenizer) -> Tokenizer:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, tokenizers.Tokenizer):
        name = type(tokenizer).__name__
        raise ConfigError(
            f"{name} is no tokenizer that can be read: give one of ratchet.data.chat.tokenizer, or "
            "a fast one of transformers"
        )
    template = getattr(tokenizer, "chat_template", None)
    return Tokenizer(
        tokenizers.Tokenizer.from_str(backend.to_str()),
        config=dict(tokenizer.special_tokens_map),
        chat_template=template if isinstance(template, str) else None,
    )


def make_datum(
    messages: Sequence[Mapping[str, str]],
    tokenizer: TokenizerType,
    *,
    idx: int = 0,
    task_name: str = "",
    extra_env_info: dict[str, Any] | None = None,
    stop_strings: list[str] | None = None,
) -> DatumSpec:
    """A sample whose prompt is `messages`, rendered by the tokenizer's chat template. All its
    tokens lie in the last message: a template's text is not cut at the messages."""
    tokens = renderer_of(tokenizer).prompt([as_message(message) for message in messages])
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
