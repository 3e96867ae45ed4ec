"""Checks of the model that a run starts with, without reading its files."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from ratchet.config.checks.clash import Conflict, clash
from ratchet.config.diagnostics import suggest_name
from ratchet.config.model_shape.decoder_config import DecoderConfig
from ratchet.config.model_shape.presets import PRESETS, get_preset
from ratchet.config.schema import ModelConfig, RunConfig
from ratchet.errors import ModelError
from ratchet.utils.object_store import explain_bad_address, is_address


def address_conflicts(config: RunConfig) -> Iterator[Conflict]:
    """Yield a conflict for each object-store address that can't be used."""
    model, tokenizer = dict(config.model), dict(config.tokenizer)  # each kind has its own keys
    addresses = {
        "run_dir": config.run_dir,
        "model.path": config.model.path,
        "tokenizer.path": tokenizer.get("path"),
    }
    for key, address in addresses.items():
        if address is not None and is_address(address) and (reason := explain_bad_address(address)):
            yield clash(f"{key}={address} can't be used: {reason}", key)
    for section, keys in (("model", model), ("tokenizer", tokenizer)):
        address, revision = keys.get("path"), keys.get("revision")
        if address is not None and is_address(address) and revision is not None:
            key = f"{section}.revision"
            yield clash(
                f"{key}={revision} is for a repository on the Hugging Face Hub, and {address} has "
                f"no revisions: remove {key}",
                key,
            )


def model_conflicts(config: RunConfig) -> Iterator[Conflict]:
    """Yield the conflicts within the `model` section, and with the tokenizer."""
    model = config.model
    if model.preset is None and model.path is None:
        yield clash(
            "neither model.preset nor model.path is set: set model.preset (say tiny) or model.path",
            "model",
        )
    elif model.preset is not None and model.path is not None:
        yield clash(
            f"model.preset={model.preset} and model.path={model.path} both name a model: remove "
            "one",
            "model.preset",
        )
    elif model.preset is not None:
        yield from _check_preset(config, model, model.preset)
    if model.train_encoders and (model.preset is not None or model.backend == "ratchet"):
        yield clash(
            "model.train_encoders=true needs a multimodal model, loaded by transformers from "
            "model.path: remove model.train_encoders",
            "model.train_encoders",
        )
    if model.trust_remote_code and model.backend == "ratchet":
        yield clash(
            "model.trust_remote_code is read only by transformers: remove it, or set "
            "model.backend=auto",
            "model.trust_remote_code",
        )


def _check_preset(config: RunConfig, model: ModelConfig, name: str) -> Iterator[Conflict]:
    if name not in PRESETS:
        yield clash(f"there is no preset '{name}'{suggest_name(name, PRESETS)}", "model.preset")
    shape = shape_defaults()
    for key in model.overrides:
        if key not in shape:
            yield clash(
                f"a preset has no field '{key}'{suggest_name(key, shape)}", f"model.overrides.{key}"
            )
    if name in PRESETS and all(key in shape for key in model.overrides):
        yield from _check_shape(name, model.overrides)
    if model.revision is not None:
        yield clash(
            "model.revision belongs to model.path, not to a preset: remove it", "model.revision"
        )
    if model.backend == "transformers":
        yield clash(
            "model.backend=transformers can't build a model.preset: set model.backend=auto",
            "model.backend",
        )
    tokenizer: Any = config.tokenizer
    if tokenizer.kind == "auto" and tokenizer.path is None:
        yield clash(
            "tokenizer.kind=auto reads the model's tokenizer, and a model.preset has none: "
            "set tokenizer.kind=characters, bytes or byte_bpe, or tokenizer.path",
            "tokenizer.kind",
            "tokenizer",
        )


def _check_shape(name: str, overrides: Mapping[str, Any]) -> Iterator[Conflict]:
    """Yield a conflict for a shape that no decoder has.

    The tokenizer, which sets the vocabulary size, is not loaded yet; a small size takes its place.
    """
    try:
        get_preset(name, **{"vocab_size": 256, **overrides})
    except ModelError as error:
        key = next((key for key in overrides if re.match(rf"{re.escape(key)}\b", str(error))), None)
        yield clash(
            f"no model has this shape: {error}",
            "model.overrides" if key is None else f"model.overrides.{key}",
        )


def shape_defaults() -> dict[str, Any]:
    """Return the fields of a decoder's shape, with their defaults."""
    return {field.name: field.default for field in fields(DecoderConfig)}


def known_context(model: ModelConfig) -> int | None:
    """Return the context length of a preset in tokens; None for a model with another source."""
    shape = PRESETS.get(model.preset or "")
    if shape is None:
        return None
    context = {"max_positions": shape_defaults()["max_positions"], **shape, **model.overrides}[
        "max_positions"
    ]
    return context if isinstance(context, int) else None
