"""Load a policy from a directory, an object store or the Hub, or create one with random weights."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from ratchet.config.model_shape.config_json import MEDIA_CONFIG_KEYS
from ratchet.config.model_shape.decoder_config import DecoderConfig, unsupported_reason
from ratchet.errors import ModelError
from ratchet.models.config_overrides import override_config
from ratchet.models.lora.files import CONFIG as ADAPTER_CONFIG
from ratchet.models.policy import DecoderPolicy, PolicyModel
from ratchet.models.scalar_head import HEAD_FILE
from ratchet.models.weights.hf_weights import INDEX, empty_decoder, load_decoder, read_json
from ratchet.utils import safe_read
from ratchet.utils.object_store import (
    expand_home,
    explain_bad_address,
    fetch_directory,
    is_address,
)
from ratchet.utils.terminal_text import shorten_text

if TYPE_CHECKING:
    from ratchet.models.transformers.policy import TransformersPolicy

Backend = Literal["auto", "ratchet", "transformers"]
MAX_NAMES = 1000  # names of a directory among which a similar one is sought
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+|[\w-][\w.-]*")
# .bin files are left out, because unpickling one runs code.
HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]


def load_policy(
    name: str | Path,
    *,
    backend: Backend = "auto",
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    trust_remote_code: bool = False,
    revision: str | None = None,
    train_encoders: bool = False,
    overrides: Mapping[str, Any] | None = None,
) -> PolicyModel:
    """Return the policy of a Hugging Face directory or Hub id.

    Args:
        backend: "ratchet" is the built-in decoder. "transformers" runs any causal language model of
            that library. "auto" is the built-in decoder if it can represent the model, otherwise
            transformers.
        revision: Branch, tag or commit on the Hub.
        train_encoders: True to train the encoders of images, audio and video too.
        overrides: Fields of `config.json` to change, as in `override_config`.

    Raises ModelError if there is no model of that name, if the backend can't read it, if
    `train_encoders` is set and the model has no encoders, or as `override_config` does.
    """
    directory = find_model(name, revision=revision, with_code=trust_remote_code)
    hf = read_model_config(
        directory, overrides, backend=backend, trust_remote_code=trust_remote_code
    )
    reason = unsupported_reason(hf)
    if backend == "ratchet" or (backend == "auto" and reason is None):
        if train_encoders:
            raise ModelError(
                f"'{name}' only reads text, but model.train_encoders=true needs encoders of media: "
                "remove model.train_encoders"
            )
        return DecoderPolicy(load_decoder(directory, dtype=dtype, device=device, hf=hf))
    return load_transformers_policy(
        directory,
        dtype=dtype,
        device=device,
        trust_remote_code=trust_remote_code,
        train_encoders=train_encoders,
        hf=hf if overrides else None,
    )


def read_model_config(
    directory: Path,
    overrides: Mapping[str, Any] | None,
    *,
    backend: Backend,
    trust_remote_code: bool,
) -> dict[str, Any]:
    """Return the content of a directory's `config.json` with the overrides.

    Raises ModelError if there is no such file, or as `override_config` does.
    """
    return override_config(
        read_json(directory / "config.json"),
        overrides or {},
        directory,
        trust_remote_code=trust_remote_code,
        uses_transformers=backend == "transformers",
    )


def load_transformers_policy(
    directory: Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    trust_remote_code: bool = False,
    train_encoders: bool = False,
    hf: Mapping[str, Any] | None = None,
) -> TransformersPolicy:
    """Return the policy of a Hugging Face directory, run by transformers.

    hf: Content of `config.json` to use in place of the file's; None: the file's.

    Raises ModelError if the model can't be read, or if `train_encoders` is set and it has no
    encoders.
    """
    options: dict[str, Any] = {
        "dtype": dtype,
        "device": device,
        "trust_remote_code": trust_remote_code,
        "hf": hf,
    }
    if reads_media(directory):
        from ratchet.models.transformers.multimodal_policy import MultimodalPolicy

        return MultimodalPolicy.load(directory, **options, train_encoders=train_encoders)
    if train_encoders:
        raise ModelError(
            f"{directory} only reads text, but model.train_encoders=true needs encoders of media: "
            "remove model.train_encoders"
        )
    from ratchet.models.transformers.policy import TransformersPolicy

    return TransformersPolicy.load(directory, **options)


def reads_media(directory: Path) -> bool:
    """True if the model has encoders of images, audio or video."""
    config = read_json(directory / "config.json")
    return any(key in config for key in MEDIA_CONFIG_KEYS)


def init_policy(
    config: DecoderConfig,
    seed: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> DecoderPolicy:
    """Return a decoder with random weights. A seed gives the same bits on every device."""
    return DecoderPolicy(empty_decoder(config, dtype=dtype, device=device).init_weights(seed))


def is_hub_id(name: str | Path) -> bool:
    """True if a model's name is treated as a Hub id, because it is not a path on this machine."""
    text, path = str(name), expand_home(name)
    return not (
        isinstance(name, Path)
        or path.exists()
        or text.startswith((".", "/", "~"))
        or not HUB_ID.fullmatch(text)
        or _first_part_exists(path)
    )


def find_model(name: str | Path, *, revision: str | None = None, with_code: bool = False) -> Path:
    """Return the local directory of a model, downloading it if needed.

    Hub ids and addresses such as s3://bucket/model are downloaded. A name that looks like a path is
    never downloaded. Raises ModelError if there is no such model.

    with_code: True to download Python files too.
    """
    if is_address(name):
        return _fetch(str(name), revision, with_code)
    path = expand_home(name)
    if path.is_dir():
        if reason := safe_read.explain_broken_link(path):
            raise ModelError(reason)
        _refuse_adapter(path)
        return path
    text = str(name)
    if path.exists():
        raise ModelError(
            f"'{text}' is a file, but a model is a directory with config.json and safetensors files"
        )
    if not is_hub_id(name):
        raise ModelError(f"there is no model directory '{text}': {_explain_missing(path)}")
    return _download(text, revision, with_code)


def _refuse_adapter(path: Path) -> None:
    """Raise ModelError for a directory that holds a LoRA adapter instead of a model."""
    if not (path / ADAPTER_CONFIG).is_file() or (path / "config.json").is_file():
        return
    try:
        base = str(safe_read.read_json(path / ADAPTER_CONFIG)["base_model_name_or_path"] or "BASE")
    except (OSError, ValueError, KeyError, TypeError):
        base = "BASE"
    raise ModelError(
        f"{path} is a LoRA adapter without its base model. Merge the two: `ratchet convert "
        f"{shorten_text(base, 200)} NEW_DIRECTORY --merge-lora {path}`, or name the adapter's run, "
        "whose model/ has it merged"
    )


def _explain_missing(path: Path) -> str:
    """Return how far a path exists, and the name there that is nearest to the one that does not."""
    existing = next((parent for parent in path.absolute().parents if parent.is_dir()), Path("/"))
    missing = path.absolute().relative_to(existing).parts[0]
    near: list[str] = []
    with suppress(OSError):  # a directory that can't be listed
        near = get_close_matches(missing, sorted(os.listdir(existing))[:MAX_NAMES], n=1)
    hint = f", which has '{near[0]}'" if near else ""
    return f"the path exists only as far as '{existing}'{hint}"


def copy_companions(source: Path, target: Path) -> None:
    """Copy a model's files other than its weights: config.json, tokenizer and custom code.

    The head of a reward model (`score.safetensors`) is copied too.
    """
    patterns = [pattern for pattern in (*HUB_FILES, "*.py") if pattern != "*.safetensors"]
    companions = {path for pattern in (*patterns, HEAD_FILE) for path in source.glob(pattern)}
    for path in sorted(companions):
        if path.is_file() and path.name not in (INDEX, "metadata.json"):
            shutil.copyfile(path, target / path.name)


def _first_part_exists(path: Path) -> bool:
    """True if the first part of a relative path exists.

    If there is a directory `runs`, then `runs/sft` is a mistyped path, not a Hub id.
    """
    return len(path.parts) > 1 and Path(path.parts[0]).is_dir()


def _list_file_patterns(with_code: bool) -> list[str]:
    return [*HUB_FILES, "*.py"] if with_code else HUB_FILES


def _fetch(address: str, revision: str | None, with_code: bool) -> Path:
    if reason := explain_bad_address(address):
        raise ModelError(f"{address} can't hold a model: {reason}")
    if revision is not None:
        raise ModelError(
            f"revision '{revision}' is only for a model on the Hub, not for {address}: remove the "
            "revision"
        )
    try:
        directory = fetch_directory(address, _list_file_patterns(with_code), deep=False)
    except OSError as error:
        raise ModelError(f"the model can't be fetched: {error}") from error
    if not (directory / "config.json").is_file():
        raise ModelError(
            f"{address} holds no model (no config.json): name a Hugging Face model directory"
        )
    return directory


def _download(name: str, revision: str | None, with_code: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    patterns = _list_file_patterns(with_code)
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    # Every network and Hub error is an OSError.
    except (HFValidationError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        revision_text = f" at revision '{revision}'" if revision else ""
        raise ModelError(
            f"'{name}' is not a local directory, and can't be downloaded from the Hugging Face Hub"
            f"{revision_text} ({reason}): check the name, the network, and for a gated model the "
            "token (`hf auth login`)"
        ) from None
