"""A multimodal model's processor of images, audio clips and videos, one medium at a time.

A processor of transformers turns a whole conversation into tokens and arrays. Here it gets one
medium with its placeholder, and returns the tokens that replace the placeholder in the
conversation. So all text keeps the tokens in which it was sampled.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np
from xxhash import xxh3_128

from ratchet.config.media_limits import PROCESSOR_FILES, MediaConfig
from ratchet.data.formats.media import (
    decode_audio,
    decode_image,
    decode_video,
    fetch,
    shorten_reference,
)
from ratchet.errors import DataError, ModelError
from ratchet.types import MediaKind, Medium, Part
from ratchet.utils.safe_read import require_file
from ratchet.utils.terminal_text import get_first_line

MEDIA_KINDS: tuple[MediaKind, ...] = get_args(MediaKind)
# Attributes of a transformers processor that read each kind of media.
READER_ATTRIBUTES: Mapping[MediaKind, Sequence[str]] = {
    "image": ("image_processor",),
    "audio": ("feature_extractor", "audio_processor"),
    "video": ("video_processor",),
}
# Outputs of a processor that describe tokens, not media.
TOKEN_OUTPUTS = frozenset({"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"})


class ExpandedMedium(NamedTuple):
    """A processed medium, and the tokens that its placeholder expands to."""

    medium: Medium
    tokens: tuple[int, ...]


class Processor:
    """A cached processor of single media.

    Args:
        inner: A processor of transformers, or one with the same interface.
        fingerprint: Hash of everything that decides the processor's output.
        media: Limits of the media, the directory that their paths are relative to, and the size of
            the cache. None takes the defaults.
    """

    def __init__(
        self,
        inner: Any,
        *,
        fingerprint: str,
        media: MediaConfig | None = None,
    ) -> None:
        self.inner, self.fingerprint = inner, fingerprint
        self.limits = media or MediaConfig()
        self._max_cached_bytes = self.limits.remembered_mib * 2**20
        self._expanded_by_key: OrderedDict[str, ExpandedMedium] = OrderedDict()
        self._cached_bytes = 0
        self._lock = threading.Lock()

    @cached_property
    def kind_by_placeholder(self) -> Mapping[int, MediaKind]:
        """Map chat templates' placeholder tokens to the kinds of media that the model reads."""
        kinds: list[MediaKind] = [
            kind
            for kind in MEDIA_KINDS
            if getattr(self.inner, f"{kind}_token", None) and self._can_read(kind)
        ]
        ids = self.inner.tokenizer.convert_tokens_to_ids
        return {int(ids(getattr(self.inner, f"{kind}_token"))): kind for kind in kinds}

    @cached_property
    def media_token_ids(self) -> frozenset[int]:
        """Return the tokens that stand for media: placeholders, and the tokens they expand to."""
        token_ids = {getattr(self.inner, f"{kind}_token_id", None) for kind in MEDIA_KINDS}
        return frozenset(self.kind_by_placeholder) | {
            int(token) for token in token_ids if token is not None
        }

    def expand(self, part: Part, *, where: str) -> ExpandedMedium:
        """Return the processed medium of a message part, from the cache if it is there.

        Args:
            where: The place of the part, for errors.

        Raises DataError if the medium can't be read, or if the model doesn't support its kind.
        """
        kind = part.type
        if kind == "text" or kind not in self.kind_by_placeholder.values():
            kinds = " and ".join(self.kind_by_placeholder.values()) or "no media"
            raise DataError(
                f"{where} has a part of the type '{kind}', and the model reads {kinds}: remove the "
                "part"
            )
        source = fetch(part.value, where=where, limits=self.limits, root=self.limits.root)
        key = xxh3_128(f"{self.fingerprint} {kind} ".encode() + source).hexdigest()
        with self._lock:
            if key in self._expanded_by_key:
                self._expanded_by_key.move_to_end(key)
                return self._expanded_by_key[key]
        expanded = self._process(key, kind, source, f"{where}: {shorten_reference(part.value)}")
        with self._lock:
            return self._cache(expanded)

    def _cache(self, expanded: ExpandedMedium) -> ExpandedMedium:
        cached = self._expanded_by_key.setdefault(expanded.medium.key, expanded)
        if cached is expanded:
            self._cached_bytes += _count_bytes(expanded)
            while self._cached_bytes > self._max_cached_bytes and len(self._expanded_by_key) > 1:
                _, evicted = self._expanded_by_key.popitem(last=False)
                self._cached_bytes -= _count_bytes(evicted)
        return cached

    def _process(self, key: str, kind: MediaKind, source: bytes, where: str) -> ExpandedMedium:
        decoded = self._decode(kind, source, where)
        token = str(getattr(self.inner, f"{kind}_token"))
        try:
            outputs = dict(
                self.inner(text=[token], return_tensors="np", add_special_tokens=False, **decoded)
            )
        except (ValueError, TypeError, IndexError, KeyError, ImportError) as error:
            reason = get_first_line(str(error) or type(error).__name__)
            raise DataError(
                f"{where}: the model's processor refuses the {kind}: {reason}"
            ) from error
        tokens = tuple(int(token) for token in np.asarray(outputs["input_ids"]).reshape(-1))
        inputs = {
            name: np.asarray(value) for name, value in outputs.items() if name not in TOKEN_OUTPUTS
        }
        n_frames = len(decoded["videos"][0]) if kind == "video" else None
        return ExpandedMedium(Medium(key, kind, len(tokens), inputs, source, n_frames), tokens)

    def _decode(self, kind: MediaKind, source: bytes, where: str) -> dict[str, Any]:
        if kind == "image":
            return {"images": [decode_image(source, where=where, limits=self.limits)]}
        if kind == "audio":
            rate = self.inner.feature_extractor.sampling_rate
            clip = decode_audio(source, where=where, limits=self.limits, rate_hz=rate)
            return {"audio": [clip.samples_N], "sampling_rate": rate}
        return {"videos": [decode_video(source, where=where, limits=self.limits)]}

    def _can_read(self, kind: MediaKind) -> bool:
        return any(getattr(self.inner, name, None) is not None for name in READER_ATTRIBUTES[kind])

    @property
    def settings(self) -> Mapping[str, Any]:
        """Return the settings that decide how media are processed.

        Models whose processors have equal settings can use the same processed media.
        """
        parts = {
            name: getattr(self.inner, name, None)
            for names in READER_ATTRIBUTES.values()
            for name in names
        }
        return {name: part.to_dict() for name, part in parts.items() if part is not None}


def _count_bytes(expanded: ExpandedMedium) -> int:
    return len(expanded.medium.source) + sum(
        array.nbytes for array in expanded.medium.inputs.values()
    )


def load_processor(
    directory: str | Path, *, media: MediaConfig | None = None, trust_remote_code: bool = False
) -> Processor | None:
    """Return the processor in a model's directory; None if it has none.

    Raises ModelError if transformers can't read it.
    """
    directory = Path(directory)
    files = [directory / name for name in PROCESSOR_FILES if (directory / name).is_file()]
    if not files:
        return None
    try:
        for path in (*files, directory / "config.json"):
            require_file(path)
        inner = _load_inner(directory, trust_remote_code)
    # Every processor of transformers raises its own types of errors.
    except Exception as error:
        reason = get_first_line(str(error) or type(error).__name__)
        raise ModelError(
            f"transformers can't read the processor in {directory}: {reason}"
        ) from error
    content = b"".join(path.name.encode() + path.read_bytes() for path in files)
    return Processor(inner, fingerprint=xxh3_128(content).hexdigest(), media=media)


def _load_inner(directory: Path, trust_remote_code: bool) -> Any:
    from transformers import AutoProcessor  # the import takes seconds

    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": trust_remote_code}
    try:
        return AutoProcessor.from_pretrained(directory, **options)
    except ImportError:  # the video processor needs torchvision
        return _load_without_videos(directory, options)


def _load_without_videos(directory: Path, options: Mapping[str, Any]) -> Any:
    """Return the model family's processor without its video processor."""
    import transformers
    from transformers import AutoConfig
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    processor_class: Any = PROCESSOR_MAPPING[type(AutoConfig.from_pretrained(directory, **options))]
    loaders = {
        "tokenizer": "AutoTokenizer",
        "image_processor": "AutoImageProcessor",
        "feature_extractor": "AutoFeatureExtractor",
    }
    names: Sequence[str] = processor_class.get_attributes()
    if "video_processor" not in names:
        raise ImportError(f"{processor_class.__name__} needs a package that is not installed")
    parts = {
        name: getattr(transformers, loaders[name]).from_pretrained(directory, **options)
        for name in names
        if name in loaders
    }

    class WithoutVideos(processor_class):
        def check_argument_for_proper_class(self, argument_name: str, argument: object) -> Any:
            return (
                None
                if argument_name == "video_processor"
                else super().check_argument_for_proper_class(argument_name, argument)
            )

    return WithoutVideos(**{name: parts.get(name) for name in names})
