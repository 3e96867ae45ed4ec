"""The configuration sections of tokenizers. Importing this module loads no tokenizer library."""

from __future__ import annotations

import json
import string
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator

from ratchet.config.base import Section

# Printable ASCII and the newline.
PRINTABLE = string.digits + string.ascii_letters + string.punctuation + " \n"
DATE_FORMAT = "%Y-%m-%d"
# Variables that every rendering passes to a chat template.
TEMPLATE_ARGUMENTS = ("messages", "tools", "add_generation_prompt")


class TokenizerConfig(Section):
    """The base section of tokenizers.

    `ratchet.training.from_config` calls the function that `builds` names, with the section and the
    model's directory or Hub id (None for a model with random weights).
    """

    template: str | None = None
    """Chat template: plain, turns, chatml, or the path of a .jinja file; null: the tokenizer's own
    template."""
    chat_template_kwargs: dict[str, Any] = Field(default={})
    """Variables of the chat template: {enable_thinking: false}. The template of the exported model
    has them as defaults."""
    tool_format: Literal[
        "auto",
        "hermes",
        "qwen3_coder",
        "llama",
        "mistral",
        "deepseek",
        "kimi",
        "minimax",
        "glm",
        "harmony",
    ] = "auto"
    """Format of the model's tool calls; auto: inferred from the template and the special tokens."""
    date: str | None = None
    """Date that templates print as today, such as 2026-01-31; null: the date of the run's start."""

    @field_validator("chat_template_kwargs")
    @classmethod
    def _check_variables(cls, variables: dict[str, Any]) -> dict[str, Any]:
        for name, value in variables.items():
            if not name.isidentifier() or name in TEMPLATE_ARGUMENTS or name.endswith("_token"):
                raise ValueError(f"{name} is not a variable that can be set: remove it")
            try:
                json.dumps(value, allow_nan=False)
            except (TypeError, ValueError):
                raise ValueError(
                    f"{name}={value!r:.80} is not a text, number, list or map"
                ) from None
        return variables

    @field_validator("date")
    @classmethod
    def _check_date(cls, date: str | None) -> str | None:
        if date is not None and not _is_date(date):
            raise ValueError(f"{date!r} is not a date: write it as 2026-01-31")
        return date


def _is_date(text: str) -> bool:
    """True for a day such as 2026-01-31. `strptime` alone accepts 2026-1-31 too."""
    try:
        return datetime.strptime(text, DATE_FORMAT).date().isoformat() == text
    except ValueError:
        return False


class AutoTokenizerConfig(TokenizerConfig):
    """The section of the model's own tokenizer, or of a tokenizer at `path`."""

    builds: ClassVar[str] = "ratchet.data.chat.builtin_tokenizers:build_auto"

    path: str | None = None
    """Directory, address or Hub id of the tokenizer; null: that of the model."""
    revision: str | None = None
    """Branch, tag or commit on the Hub; null: the default branch."""


class CharactersConfig(TokenizerConfig):
    """The section of a tokenizer with a token for each character."""

    builds: ClassVar[str] = "ratchet.data.chat.builtin_tokenizers:build_characters"

    alphabet: str = Field(PRINTABLE, min_length=1)
    """The characters that have a token."""

    @field_validator("alphabet")
    @classmethod
    def _check_distinct(cls, alphabet: str) -> str:
        repeated = sorted({c for c in alphabet if alphabet.count(c) > 1})
        if repeated:
            raise ValueError(f"alphabet repeats {''.join(repeated)!r}: list each character once")
        return alphabet


class BytesConfig(TokenizerConfig):
    """The section of a tokenizer with a token for each byte of UTF-8, which covers every text."""

    builds: ClassVar[str] = "ratchet.data.chat.builtin_tokenizers:build_bytes"


class ByteBPEConfig(TokenizerConfig):
    """The section of a byte-level BPE tokenizer, trained on text files before the run starts."""

    builds: ClassVar[str] = "ratchet.data.chat.builtin_tokenizers:build_byte_bpe"

    texts: tuple[Path, ...] = Field(min_length=1)
    """Text files (UTF-8) to train on, read line by line."""
    vocab_size: int = Field(4096, ge=264)
    """Number of tokens: 256 bytes, 8 special tokens, and the merges."""
