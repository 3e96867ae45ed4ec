"""Change fields of a model's `config.json` as it is read: the `model.overrides` of a recipe.

The saved weights stay as they are. So a change of their names or shapes is refused, and so is a
field that nothing would read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from ratchet.config.diagnostics import suggest_name
from ratchet.config.model_shape.config_json import (
    HF_LISTS,
    HF_NUMBERS,
    HF_OBJECTS,
    ORIGINAL_CONTEXT,
    check_types,
    read_rope_section,
)
from ratchet.config.model_shape.decoder_config import FAMILIES, DecoderConfig, unsupported_reason
from ratchet.config.model_shape.decoder_config import ROPE_KEYS as DECODER_SCALINGS
from ratchet.errors import ModelError
from ratchet.models.decoder import Decoder
from ratchet.models.weights.hf_weights import read_json
from ratchet.models.weights.weight_layout import list_pieces

Shapes = dict[str, tuple[int, ...]]

KEY = "model.overrides"
GENERATION_FILE = "generation_config.json"  # its end-of-sequence ids take precedence
ROPE_SECTIONS = ("rope_parameters", "rope_scaling")  # the newer and the older name of one section
# Fields of a rotary section that the weights were trained with, whatever the scaling.
KEPT_ROPE_FIELDS = ("rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved")
# Fields that something else decides, with what decides them.
FIXED_FIELDS: Mapping[str, str] = {
    **dict.fromkeys(("model_type", "architectures", "auto_map"), "the saved weights"),
    "quantization_config": "the saved weights",
    **dict.fromkeys(("dtype", "torch_dtype"), "the precision of the recipe"),
    "transformers_version": "the program that saved the model",
    "use_cache": "the generator",
}


def override_config(
    config: Mapping[str, Any],
    overrides: Mapping[str, Any],
    directory: Path,
    *,
    trust_remote_code: bool = False,
    uses_transformers: bool = False,
) -> dict[str, Any]:
    """Return the content of a `config.json` with the fields of `overrides` changed.

    A section such as text_config is merged field by field. Every other value is replaced, except
    that a rotary section keeps the old fields of `KEPT_ROPE_FIELDS` that it does not set, and a
    scaled one without original_max_position_embeddings gets the length of context before the
    change. Where each kind of layer has a rotary section, kinds that are not overridden keep
    theirs.

    Args:
        config: The content of the file.
        overrides: New values of its fields.
        directory: The model's directory.
        trust_remote_code: True to let transformers run code of the directory.
        uses_transformers: True if transformers runs the model even where the built-in decoder can.

    Raises ModelError, which names the field, for a field that the model's configuration lacks, that
    something else decides, that changes the names or shapes of the saved weights, or that the
    built-in decoder does not read.
    """
    if not overrides:
        return dict(config)
    _check_names(config, overrides, KEY, _FieldNames(directory, trust_remote_code), ())
    _check_end_ids(overrides, directory)
    changed = _merge(config, overrides)
    if changed.get("model_type") in FAMILIES:
        check_types(changed, remedy=f"correct {KEY}")
    _check_weights(config, overrides, changed)
    if not uses_transformers and _are_decoders(config, changed):
        _check_effect(config, overrides)
    return changed


def _are_decoders(*configs: Mapping[str, Any]) -> bool:
    """True if the built-in decoder runs the models of all these configurations."""
    return all(unsupported_reason(config) is None for config in configs)


# --- names


class _FieldNames:
    """The names of the fields that transformers knows in a model's configuration."""

    def __init__(self, directory: Path, trust_remote_code: bool) -> None:
        self.directory = directory
        self.trust_remote_code = trust_remote_code
        self._config: Any = None

    def list(self, section: tuple[str, ...]) -> set[str]:
        """Return the field names of a nested section, () for the whole; empty if there is none."""
        # This import takes seconds, and most overrides name a field that the file has.
        from transformers import AutoConfig

        from ratchet.models.transformers.loading import translate_errors

        if self._config is None:
            with translate_errors(self.directory, "the configuration"):
                self._config = AutoConfig.from_pretrained(
                    self.directory, trust_remote_code=self.trust_remote_code, local_files_only=True
                ).to_dict()
        fields = self._config
        for key in section:
            fields = fields.get(key) or {}
        return set(fields)


def _check_names(
    config: Mapping[str, Any],
    overrides: Mapping[str, Any],
    place: str,
    names: _FieldNames,
    section: tuple[str, ...],
) -> None:
    """Raise ModelError for a field that can't be overridden.

    place: the key of the recipe that holds `overrides`.
    section: the keys that lead to `config` from the whole configuration.
    """
    if all(key in overrides for key in ROPE_SECTIONS):
        raise ModelError(
            f"{place} has {' and '.join(ROPE_SECTIONS)}, names of one section: remove one"
        )
    cheap = {*config, *ROPE_SECTIONS}
    if not section:
        cheap |= {*HF_NUMBERS, *HF_LISTS, *HF_OBJECTS}
    for key, value in overrides.items():
        if key in FIXED_FIELDS:
            raise ModelError(
                f"{place}.{key} can't be changed, because it follows from {FIXED_FIELDS[key]}: "
                "remove it"
            )
        if "drop" in str(key):
            raise ModelError(
                f"{place}.{key} has no effect, because policies are scored and trained without "
                "dropout: remove it"
            )
        nested = config.get(key)
        if isinstance(nested, Mapping) and key.endswith("_config"):
            if not isinstance(value, Mapping):
                raise ModelError(f"{place}.{key}={value!r:.80} must be a section of fields")
            _check_names(nested, value, f"{place}.{key}", names, (*section, key))
        elif key not in cheap and key not in (known := {*cheap, *names.list(section)}):
            raise ModelError(
                f"{place}.{key}: the model's configuration has no field '{key}'"
                f"{_suggest(key, known, config)}"
            )


def _suggest(key: str, known: set[str], config: Mapping[str, Any]) -> str:
    """Return the end of the message about an unknown field, with the nearest name."""
    for section, fields in config.items():
        if isinstance(fields, Mapping) and section.endswith("_config") and key in fields:
            return f"; did you mean '{section}.{key}'?"
    return suggest_name(key, sorted(known))


# --- values


def _merge(
    config: Mapping[str, Any], overrides: Mapping[str, Any], place: str = KEY
) -> dict[str, Any]:
    """Return the configuration with the overrides.

    place: the key of the recipe that holds `overrides`.
    """
    merged = dict(config)
    for key, value in overrides.items():
        nested = config.get(key)
        if key in ROPE_SECTIONS:
            _set_rope(merged, config, value, place)
        elif isinstance(nested, Mapping) and key.endswith("_config"):
            merged[key] = _merge(nested, value, f"{place}.{key}")
        else:
            merged[key] = value
    # The rotary section takes precedence where both say it.
    rope_key = _find_rope_key(merged)
    replaces_rope = any(key in overrides for key in ROPE_SECTIONS)
    if "rope_theta" in overrides and rope_key is not None and not replaces_rope:
        if kinds := _list_layer_kinds(merged[rope_key]):
            raise ModelError(
                f"{place}.rope_theta has no effect, because each kind of layer has its own. Set "
                f"{place}.{rope_key}.{kinds[0]}.rope_theta"
            )
        merged[rope_key] = {**merged[rope_key], "rope_theta": overrides["rope_theta"]}
    return merged


def _set_rope(merged: dict[str, Any], config: Mapping[str, Any], value: Any, place: str) -> None:
    """Replace the rotary section of a configuration, under the name that it has there."""
    key = _find_rope_key(config) or ROPE_SECTIONS[0]
    place = f"{place}.{key}"
    if value is not None and not isinstance(value, Mapping):
        raise ModelError(f"{place}={value!r:.80} must be a section, such as {{rope_type: yarn}}")
    rope, old = value or {}, read_rope_section(config)
    kinds = _list_layer_kinds(old)
    if kinds and not (rope and {*rope} <= {*kinds}):
        raise ModelError(
            f"{place}={value!r:.80} must have a section for a kind of layer ({', '.join(kinds)}), "
            f"such as {{{kinds[0]}: {{rope_type: yarn}}}}"
        )
    if kinds or _list_layer_kinds(rope):
        sections = {
            kind: _complete_rope(section, old.get(kind, {}), config, f"{place}.{kind}")
            for kind, section in rope.items()
        }
        section = {**old, **sections} if kinds else sections
    else:
        section = _complete_rope(rope, old, config, place)
        if config.get(ORIGINAL_CONTEXT) is not None and ORIGINAL_CONTEXT in section:
            merged[ORIGINAL_CONTEXT] = section[ORIGINAL_CONTEXT]
    for name in ROPE_SECTIONS:
        merged.pop(name, None)
    merged[key] = section


def _complete_rope(
    rope: Any, old: Mapping[str, Any], config: Mapping[str, Any], place: str
) -> dict[str, Any]:
    """Return a rotary section with what it keeps of the old one."""
    if not isinstance(rope, Mapping):
        raise ModelError(f"{place}={rope!r:.80} must be a section, such as {{rope_type: yarn}}")
    section = dict(rope)
    section["rope_type"] = section.pop("type", None) or section.get("rope_type", "default")
    for name in KEPT_ROPE_FIELDS:
        if old.get(name) is not None:
            section.setdefault(name, old[name])
    _check_rope_type(section["rope_type"], f"{place}.rope_type")
    if section["rope_type"] != "default":
        original = old.get(ORIGINAL_CONTEXT) or config.get(ORIGINAL_CONTEXT)
        original = original or config.get("max_position_embeddings")
        if original is not None:
            section.setdefault(ORIGINAL_CONTEXT, original)
    return section


def _list_layer_kinds(rope: Mapping[str, Any]) -> list[str]:
    """Return the kinds of layers with rotary sections of their own; [] if all share one."""
    return [kind for kind, section in rope.items() if isinstance(section, Mapping)]


def _check_rope_type(kind: object, place: str) -> None:
    """Raise ModelError for a scaling that neither the decoder nor transformers has."""
    if isinstance(kind, str) and kind in DECODER_SCALINGS:
        return
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    if not isinstance(kind, str) or kind not in ROPE_INIT_FUNCTIONS:
        names = sorted({*DECODER_SCALINGS, *ROPE_INIT_FUNCTIONS})
        raise ModelError(
            f"{place}={kind!r:.80}: there is no such scaling{suggest_name(str(kind), names)}"
        )


def _find_rope_key(config: Mapping[str, Any]) -> str | None:
    """Return the name under which a configuration has a rotary section; None if it has none."""
    return next((key for key in ROPE_SECTIONS if config.get(key)), None)


def _check_end_ids(overrides: Mapping[str, Any], directory: Path) -> None:
    """Raise ModelError for ids of end-of-sequence tokens if another file of the model decides."""
    path = directory / GENERATION_FILE
    key = next((key for key, _ in _list_single(overrides) if key.endswith("eos_token_id")), None)
    ids = read_json(path).get("eos_token_id") if key is not None and path.exists() else None
    if ids is not None:
        raise ModelError(
            f"{KEY}.{key} has no effect, because {path} says eos_token_id={ids!r:.80}. Change that "
            "file"
        )


# --- the saved weights


def _check_weights(
    config: Mapping[str, Any], overrides: Mapping[str, Any], changed: Mapping[str, Any]
) -> None:
    """Raise ModelError if the overrides change the names or shapes of the model's weights."""
    list_shapes = _list_decoder_shapes if _are_decoders(config, changed) else _list_other_shapes
    before = list_shapes(config)
    try:
        after = list_shapes(changed)
    except ModelError as error:
        raise ModelError(f"{KEY} makes a configuration that no model has: {error}") from None
    if after == before:
        return
    # The first field that changes a shape by itself; several may do so only together.
    fields = dict(_list_single(overrides))
    key = next(
        (key for key, alone in fields.items() if _differs(list_shapes, config, alone, before)),
        ", ".join(fields),
    )
    raise ModelError(
        f"{KEY}.{key} changes the names or shapes of the saved weights, which then can't be "
        "loaded: remove it"
    )


def _list_single(overrides: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (dotted key, overrides with this field alone) of every overridden field."""
    for key, value in overrides.items():
        if isinstance(value, Mapping) and key.endswith("_config"):
            for name, alone in _list_single(value):
                yield f"{key}.{name}", {key: alone}
        else:
            yield key, {key: value}


def _differs(
    list_shapes: Callable[[Mapping[str, Any]], Shapes],
    config: Mapping[str, Any],
    overrides: Mapping[str, Any],
    before: Shapes,
) -> bool:
    """True if the overrides change the shapes `before`, or fit no model without the others."""
    try:
        return list_shapes(_merge(config, overrides)) != before
    except ModelError:
        return True


def _list_decoder_shapes(config: Mapping[str, Any]) -> Shapes:
    """Return the shape of each weight of the built-in decoder, by name."""
    with torch.device("meta"):
        layout = list_pieces(Decoder(DecoderConfig.from_hf(config)))
    return {piece.name: piece.shape for pieces in layout.values() for piece in pieces}


def _list_other_shapes(config: Mapping[str, Any]) -> Shapes:
    """Return the shape of each weight of a model of transformers, by name.

    A model of the directory's own code is not built, and has no shapes here.
    """
    from ratchet.models.transformers.loading import build_without_weights

    model = build_without_weights(config)
    return {} if model is None else {n: tuple(p.shape) for n, p in model.named_parameters()}


def _check_effect(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> None:
    """Raise ModelError for a new value that changes nothing in the built-in decoder."""
    before = DecoderConfig.from_hf(config)
    for key, value in overrides.items():
        merged = _merge(config, {key: value})
        if merged == dict(config) or unsupported_reason(merged):
            continue
        if DecoderConfig.from_hf(merged) == before:
            raise ModelError(
                f"{KEY}.{key}={value!r:.80} changes nothing in the built-in decoder: remove it, "
                "or set model.backend=transformers"
            )
