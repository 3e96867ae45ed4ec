"""Load a tokenizer from a local directory, an object store or the Hugging Face Hub."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from ratchet.data.chat.plain_tokens import compute_max_growth, convert_panics
from ratchet.data.chat.tokenizer import (
    DOWNLOAD_PATTERNS,
    HUB_ID,
    MAX_GROWTH,
    SLOW_TOKENIZER_FILES,
    SPECIAL_NAMES,
    Tokenizer,
)
from ratchet.errors import ModelError
from ratchet.utils import safe_read
from ratchet.utils.object_store import (
    expand_home,
    explain_bad_address,
    fetch_directory,
    is_address,
)
from ratchet.utils.terminal_text import get_first_line, shorten_text


def load_tokenizer(source: str | Path, *, revision: str | None = None) -> Tokenizer:
    """Return the tokenizer of a model.

    A tokenizer.json is read directly; transformers converts older formats.

    Args:
        source: A local directory, an address (s3://bucket/model), or a model on the Hugging Face
            Hub ("owner/name").
        revision: The branch, tag or commit on the Hub.

    Raises:
        ModelError: If there is no tokenizer, or its files can't be used or contradict each other.
    """
    directory = _fetch(str(source)) if is_address(source) else expand_home(source)
    if not directory.is_dir():
        directory = _download(str(source), revision)
    if reason := safe_read.explain_broken_link(directory):
        raise ModelError(reason)
    config = {
        **_read_json(directory / "special_tokens_map.json"),
        **_read_json(directory / "tokenizer_config.json"),
    }
    template = _read_chat_template(directory, config.pop("chat_template", None))
    _check_special_tokens(directory, config)
    return Tokenizer(
        _load_backend(directory),
        config=config,
        eos_ids=_read_eos_ids(directory),
        chat_template=template,
    )


def _check_special_tokens(directory: Path, config: Mapping[str, Any]) -> None:
    for name in SPECIAL_NAMES:
        value = config.get(name)
        text = value.get("content") if isinstance(value, Mapping) else value
        if not (isinstance(text, str) and text) and value is not None:
            raise ModelError(
                f"{directory}: {name} of tokenizer_config.json is {shorten_text(repr(value), 80)}, "
                "must be a text: copy the file "
                "from the original model again"
            )


def _fetch(address: str) -> Path:
    if reason := explain_bad_address(address):
        raise ModelError(f"{address} can't hold a tokenizer: {reason}")
    try:
        return fetch_directory(address, DOWNLOAD_PATTERNS, deep=False)
    except OSError as error:
        raise ModelError(f"the tokenizer can't be fetched: {error}") from error


def _load_backend(directory: Path) -> tokenizers.Tokenizer:
    path = directory / "tokenizer.json"
    if path.exists():
        state = _read_json(path)
        if "model" not in state:
            raise ModelError(
                f"{path} is not a tokenizer, because it has no 'model'. Copy the file from the "
                "original model again"
            )
        for name in ("normalizer", "decoder"):
            if (growth := compute_max_growth(state.get(name))) > MAX_GROWTH:
                raise ModelError(
                    f"{path}: its {name} makes up to {growth:,} characters of one, and "
                    f"at most {MAX_GROWTH} are allowed: copy the file from the original model again"
                )
        try:
            with convert_panics("be loaded", "its file is damaged"):
                backend = tokenizers.Tokenizer.from_file(str(path))
        # The library raises a plain Exception for a file that it can't use.
        except Exception as error:
            raise ModelError(
                f"{path} can't be used: {get_first_line(str(error))}: copy it from the original "
                "model again"
            ) from error
        if not backend.get_vocab_size():
            raise ModelError(
                f"{path} is not a tokenizer, because it has no tokens. Copy the file from the "
                "original model again"
            )
        return backend
    if not any((directory / name).is_file() for name in SLOW_TOKENIZER_FILES):
        raise ModelError(
            f"{directory} holds no tokenizer (tokenizer.json): copy it from the original model"
        )
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        for name in (*SLOW_TOKENIZER_FILES, "merges.txt"):
            if (directory / name).exists():
                safe_read.require_file(directory / name)
        with convert_panics("be loaded", "its files are damaged"):
            converted = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except Exception as error:  # Each tokenizer class raises its own kinds of errors.
        reason = get_first_line(str(error) or type(error).__name__)
        raise ModelError(
            f"transformers can't read the tokenizer in {directory}: {reason}"
        ) from error
    if not isinstance(converted, PreTrainedTokenizerFast):
        raise ModelError(
            f"{directory}: its tokenizer is written in Python and has no fast version: save one as "
            "tokenizer.json"
        )
    return converted.backend_tokenizer


def _read_eos_ids(directory: Path) -> list[int]:
    """Return the end-of-turn ids.

    generation_config.json, which lists all of them, takes precedence over config.json.
    """
    for name in ("generation_config.json", "config.json"):
        value = _read_json(directory / name).get("eos_token_id")
        if value is not None:
            ids = value if isinstance(value, list) else [value]
            if not all(type(token_id) is int for token_id in ids):
                raise ModelError(
                    f"{directory / name}: eos_token_id={shorten_text(repr(value), 80)} must be a "
                    "number, or a list of numbers"
                )
            return ids
    return []


def _read_chat_template(directory: Path, configured: Any) -> str | None:
    """Return the chat template: chat_template.jinja, else the one in tokenizer_config.json.

    Raises ModelError if the template is not text or can't be read.
    """
    path = directory / "chat_template.jinja"
    if path.exists():
        try:
            return safe_read.read_text(path)
        except OSError as error:
            raise ModelError(f"{path} can't be read: {error.strerror}") from error
        except ValueError as error:
            raise ModelError(f"{path} {error}: save it as UTF-8") from error
    if configured is None or isinstance(configured, str):
        return configured
    try:
        template = {item["name"]: item["template"] for item in configured}.get("default")
    except (TypeError, KeyError):
        template = 0  # refused below
    if template is not None and not isinstance(template, str):
        raise ModelError(
            f"{directory}: chat_template of tokenizer_config.json must be a text, or a list of "
            "templates with names"
        )
    return template


def _read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object of a file; {} if the file does not exist.

    Raises ModelError if it is not a plain file or not a JSON object.
    """
    if not path.exists():
        return {}
    try:
        content = safe_read.read_json(path)
    except OSError as error:
        raise ModelError(f"{path} can't be read: {error.strerror}") from error
    except ValueError as error:
        raise ModelError(
            f"{path} is not valid JSON ({error}): copy the file from the original model again"
        ) from error
    if not isinstance(content, dict):
        raise ModelError(
            f"{path} does not hold a JSON object: copy the file from the original model again"
        )
    return content


def _download(name: str, revision: str | None) -> Path:
    if not HUB_ID.fullmatch(name):
        raise ModelError(f"there is no model directory '{name}': check the path")
    import huggingface_hub

    try:
        return Path(
            huggingface_hub.snapshot_download(
                name, revision=revision, allow_patterns=DOWNLOAD_PATTERNS
            )
        )
    except (OSError, ValueError) as error:
        raise ModelError(
            f"'{name}' is not a local directory, and can't be downloaded from the Hugging Face "
            f"Hub: {error}\nCheck the spelling and the network, or download the model and give its "
            "directory"
        ) from error
