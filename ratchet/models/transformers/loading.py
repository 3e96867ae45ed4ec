"""Check model directories before transformers loads them, and turn its errors into ModelError."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from ratchet.config.model_shape.config_json import MEDIA_CONFIG_KEYS, SIZE_RANGES
from ratchet.errors import ModelError, RatchetError
from ratchet.utils import safe_read
from ratchet.utils.summarize import summarize_names
from ratchet.utils.terminal_text import get_first_line

READ_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")
# Maximum of a size in a config.json, by the suffix of its key. Families have different keys.
MAX_BY_SUFFIX: Mapping[str, int] = {
    "_layers": SIZE_RANGES["n_layers"][1],
    "n_layer": SIZE_RANGES["n_layers"][1],
    "depth": SIZE_RANGES["n_layers"][1],
    "_size": SIZE_RANGES["vocab_size"][1],
    "_dim": SIZE_RANGES["vocab_size"][1],
    "n_embd": SIZE_RANGES["vocab_size"][1],
    "d_model": SIZE_RANGES["vocab_size"][1],
    "_heads": SIZE_RANGES["n_heads"][1],
    "_experts": SIZE_RANGES["n_experts"][1],
}


@contextmanager
def translate_errors(directory: Path, model_kind: str) -> Iterator[None]:
    """Check the directory's files, then turn any error of transformers into a ModelError.

    The ModelError quotes the first line of the original error.

    model_kind: what is loaded, such as "a causal language model".
    """
    require_plausible(directory)
    try:
        yield
    except RatchetError:
        raise
    # Each model family has its own code in transformers, which may raise any error.
    except Exception as error:
        reason = get_first_line(str(error) or type(error).__name__)
        raise ModelError(
            f"transformers can't load {model_kind} from {directory}: {reason}"
        ) from error


def load_config(
    directory: Path, changed: Mapping[str, Any] | None, *, trust_remote_code: bool
) -> PreTrainedConfig:
    """Return the configuration of a model directory.

    changed: The content of `config.json` to read in place of the file's; None: the file's.
    """
    config = AutoConfig.from_pretrained(
        directory, trust_remote_code=trust_remote_code, local_files_only=True
    )
    if changed is None:
        return config
    # Overrides never change the model's type, and so neither the class.
    return type(config).from_dict({**changed, "_name_or_path": str(directory)})


def build_without_weights(config: Mapping[str, Any]) -> PreTrainedModel | None:
    """Return the model of a `config.json` on the meta device, where its weights take no memory.

    Return None for a model of a class that does not come with transformers.

    Raises ModelError, with the first line of transformers' error, if it can't build the model.
    """
    if config.get("model_type") not in CONFIG_MAPPING or config.get("auto_map"):
        return None
    _require_plausible_sizes(config, "the configuration", "correct it")
    reads_media = any(key in config for key in MEDIA_CONFIG_KEYS)
    auto_class = AutoModelForMultimodalLM if reads_media else AutoModelForCausalLM
    try:
        with torch.device("meta"):
            settings = CONFIG_MAPPING[config["model_type"]].from_dict(dict(config))
            return auto_class.from_config(settings)
    # As in `translate_errors`: each family has its own code.
    except Exception as error:
        raise ModelError(get_first_line(str(error) or type(error).__name__)) from error


def refuse_missing_weights(directory: Path, loading: Mapping[str, Any]) -> None:
    """Raise ModelError if weights are missing, which transformers fills with random numbers.

    loading: the info that `from_pretrained(..., output_loading_info=True)` returns. It does not
      list tied weights and buffers.
    """
    missing = sorted(loading["missing_keys"])
    if missing:
        raise ModelError(
            f"{directory} lacks the weights {summarize_names(missing, 3)}, which its config.json "
            "requires. Add the missing weight files, or correct config.json."
        )


def require_plausible(directory: Path) -> None:
    """Raise ModelError for special files (such as pipes), and for implausible sizes in config.json.

    With absurd sizes transformers would allocate memory until it runs out.
    """
    for path in (path for pattern in READ_FILES for path in directory.glob(pattern)):
        try:
            safe_read.require_file(path)
        except OSError as error:
            raise ModelError(f"{path} can't be read: {error.strerror}") from None
    path = directory / "config.json"
    if not path.is_file():
        return
    try:
        config = safe_read.read_json(path)
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} can't be read: {error}") from None
    if not isinstance(config, dict):
        raise ModelError(f"{path} holds no JSON object")
    _require_plausible_sizes(config, str(path), "copy the file from the original model")


def _require_plausible_sizes(config: Mapping[str, Any], place: str, remedy: str) -> None:
    """Raise ModelError, which names the place and the remedy, for a size that no model has."""
    for key, value in _list_numbers(config):
        maximum = next(
            (maximum for suffix, maximum in MAX_BY_SUFFIX.items() if key.endswith(suffix)), None
        )
        if maximum is not None and not 0 <= value <= maximum:
            raise ModelError(f"{place} says {key}={value:.6g}, which no model has: {remedy}")


def _list_numbers(config: Mapping[str, Any]) -> Iterator[tuple[str, int | float]]:
    """Yield (key, number) of a configuration and of the configurations nested in it."""
    pending: list[Mapping[str, Any]] = [config]
    while pending:
        for key, value in pending.pop().items():
            if isinstance(value, dict):
                pending.append(value)
            elif isinstance(value, int | float) and not isinstance(value, bool):
                yield key, value


def without_dropout(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return a copy in which every dropout rate is 0, also in nested configurations."""
    config = copy.deepcopy(config)
    nested = [value for value in vars(config).values() if isinstance(value, PreTrainedConfig)]
    for part in (config, *nested):
        for key, value in vars(part).items():
            if isinstance(value, float) and ("drop" in key):
                setattr(part, key, 0.0)
    return config
