"""Hugging Face model directories: `config.json`, `generation_config.json` and safetensors, whole or
in shards.

Our decoder fuses matrices; on disk and on the wire every weight has its canonical Hugging Face
name. The canonical tensors are *views*: consecutive rows of the fused ones, so that nothing is
copied to send or to save them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ratchet.errors import ModelError
from ratchet.models.config import DecoderConfig
from ratchet.models.decoder import Decoder
from ratchet.models.layers.quantized import Quantised
from ratchet.models.memory import require_memory
from ratchet.models.parallel.sharding import WHOLE, Part
from ratchet.models.weights.weight_layout import pieces, shards
from ratchet.utils import safe_read
from ratchet.utils.atomic_files import atomic_path, write_json
from ratchet.utils.object_store import stays_inside

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
HEAD = "lm_head.weight"
# the scalar head of a reward or value model; `ratchet.models.scalar_head` reads it
SCORE = "score.weight"
IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)  # a constant that old checkpoints carry


def canonical_weights(decoder: Decoder) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, detached view into a parameter), each weight once: a tied head is left
    out, and so are adapters. Of a matrix that rests quantised: of what it is restored to."""
    layout = pieces(decoder)
    for name, weight in decoder.named_weights():
        if name.endswith((".lora_A", ".lora_B")):
            continue
        for block in shards(
            layout[name], weight.shown if isinstance(weight, Quantised) else weight.detach()
        ):
            yield block.name, block.tensor


def load_weights(decoder: Decoder, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Copies every weight into its view, whatever its dtype and device.

    Raises ModelError naming what is missing, unexpected or of another shape; the decoder is then
    partly overwritten.
    """
    views = dict(canonical_weights(decoder))
    waiting = set(views)
    unexpected: list[str] = []
    for name, tensor in weights:
        if name not in views:
            unexpected.append(name)
        elif views[name].shape != tensor.shape:
            raise ModelError(
                f"weight '{name}' has shape {_shape(tensor)}, the config says {_shape(views[name])}"
            )
        else:
            views[name].copy_(tensor)
            waiting.discard(name)
    if waiting:
        raise ModelError(f"weights are missing: {some(sorted(waiting))}")
    if unexpected:
        raise ModelError(f"weights that this decoder has no place for: {some(unexpected)}")


def _shape(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape))


def some(names: list[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more


# --- reading


def read_json(path: Path) -> dict[str, Any]:
    """Raises ModelError where the file is absent, no plain file, or not a JSON object."""
    try:
        content = safe_read.read_json(path)
    except FileNotFoundError:
        raise ModelError(f"{path.parent} is no model directory: it has no {path.name}") from None
    except OSError as error:
        raise ModelError(f"{path} can't be read: {error.strerror}") from None
    except ValueError as error:
        raise ModelError(f"{path} can't be read: {error}") from None
    if not isinstance(content, dict):
        raise ModelError(f"{path} holds no JSON object")
    return content


def read_config(directory: Path) -> DecoderConfig:
    """Raises ModelError where our decoder can't represent the model."""
    generation = directory / "generation_config.json"
    return DecoderConfig.from_hf(
        read_json(directory / "config.json"), read_json(generation) if generation.exists() else None
    )


@dataclass(frozen=True)
class WeightFiles:
    """The safetensors of a directory: which file holds which weight."""

    directory: Path
    files: Mapping[str, str]  # weight name -> file name

    @classmethod
    def find(cls, directory: Path) -> WeightFiles:
        """Raises ModelError where there are none, or where the index names a file that isn't
        there."""
        if (directory / INDEX).exists():
            files: Any = read_json(directory / INDEX).get("weight_map", {})
            if not isinstance(files, dict) or not all(
                isinstance(file, str) for file in files.values()
            ):
                raise ModelError(
                    f"{directory / INDEX} has no weight_map of names of files: copy it from the "
                    "original model"
                )
            for file in sorted(set(files.values())):
                if not stays_inside(file):
                    raise ModelError(
                        f"{directory / INDEX} names the file '{file:.80}', which lies outside of "
                        "the directory"
                    )
                if not (directory / file).exists():
                    raise ModelError(
                        f"{directory} is incomplete: {INDEX} names {file}, which isn't there"
                    )
            return cls(directory, files)
        if (directory / WEIGHTS).exists():
            with _open(directory / WEIGHTS) as opened:
                return cls(directory, dict.fromkeys(opened.keys(), WEIGHTS))
        others = [path.name for path in sorted(directory.glob("*.bin"))]
        hint = (
            f" ({some(others)} would run code when read: convert it to safetensors)"
            if others
            else ""
        )
        raise ModelError(f"{directory} has neither {WEIGHTS} nor {INDEX}{hint}")

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """One tensor at a time, file by file, on the CPU."""
        wanted = set(names)
        for file in sorted({self.files[name] for name in wanted}):
            with _open(self.directory / file) as opened:
                for name in opened.keys():  # noqa: SIM118 (no mapping, in spite of its looks)
                    if name in wanted:
                        yield name, opened.get_tensor(name)

    def headers(self) -> Iterator[tuple[str, tuple[int, ...], torch.dtype]]:
        """(name, shape, dtype) of every weight, file by file; none is read."""
        for file in sorted(set(self.files.values())):
            with _open(self.directory / file) as opened:
                for name in opened.keys():  # noqa: SIM118
                    found = opened.get_slice(name)
                    shape = tuple(found.get_shape())
                    yield name, shape, (found[0:0] if shape else opened.get_tensor(name)).dtype

    def block(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """A part of one weight, on the CPU; the rest of it is not read. Raises ModelError where
        there is no such weight, or it has another shape."""
        if name not in self.files:
            raise ModelError(f"{self.directory}: weights are missing: {name}")
        with _open(self.directory / self.files[name]) as opened:
            found = opened.get_slice(name)
            shape = found.get_shape()
            if len(shape) != len(sizes) or any(
                a + n > m for a, n, m in zip(offsets, sizes, shape, strict=True)
            ):
                raise ModelError(
                    f"{self.directory}: weight '{name}' has shape {shape}, which the config "
                    "doesn't say"
                )
            return found[tuple(slice(a, a + n) for a, n in zip(offsets, sizes, strict=True))]


def _open(path: Path) -> Any:
    try:
        safe_read.require_file(path)
        return safe_open(path, framework="pt", device="cpu")
    except OSError as error:
        raise ModelError(f"{path} can't be read: {error.strerror or error}") from None
    except SafetensorError as error:
        raise ModelError(f"{path} is damaged or no safetensors file: {error}") from None


def load_decoder(
    directory: Path, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> Decoder:
    """The decoder of a directory. Of a reward model it is the backbone, whose missing language head
    is then the embedding.

    Raises ModelError where the directory is incomplete, or its model isn't one of ours.
    """
    config, found = read_config(directory), WeightFiles.find(directory)
    names = [name for name in found.files if name != SCORE and not name.endswith(IGNORED_SUFFIXES)]
    headless = SCORE in found.files and HEAD not in found.files
    decoder = empty_decoder(
        replace(config, tied=True) if headless else config, dtype=dtype, device=device
    )
    try:
        load_weights(decoder, _without_tied_copy(decoder, found.read(names)))
    except ModelError as error:
        raise ModelError(f"{directory}: {error}") from None
    return decoder


def _without_tied_copy(
    decoder: Decoder, weights: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Some tools save a tied head a second time. It may be left out only if it is the embedding,
    bit for bit."""
    copies = {"model.embed_tokens.weight", HEAD} if decoder.config.tied else set()
    seen: list[Tensor] = []
    for name, tensor in weights:
        if name in copies:
            seen.append(tensor)
        if name != HEAD or not copies:
            yield name, tensor
    if len(seen) == 2 and not torch.equal(*seen):
        raise ModelError(
            f"{HEAD} differs from the embedding, though tie_word_embeddings says that it is the "
            "same"
        )


def empty_decoder(
    config: DecoderConfig, *, dtype: torch.dtype, device: torch.device | str, part: Part = WHOLE
) -> Decoder:
    """Weights are uninitialised memory, taken once. Raises ModelError where a whole model's are
    more than the device holds."""
    if part == WHOLE:
        require_memory(config, dtype, device)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return Decoder(config, part)
    finally:
        torch.set_default_dtype(before)


# --- writing


class Savable(Protocol):
    """A tensor, or what becomes one when its file is written."""

    def numel(self) -> int: ...
    def to(self, device: str, dtype: torch.dtype, *, copy: bool) -> Tensor: ...


def save_decoder(
    decoder: Decoder,
    directory: Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5 * 10**9,
    weights: Mapping[str, Savable] | None = None,
) -> None:
    """Writes what `load_decoder`, transformers and vLLM read. Every file appears whole or not at
    all.

    dtype: of the file; None keeps the decoder's. A single weight larger than `max_shard_bytes` gets
    a file of its own. weights: all of them by canonical name, where they are not the decoder's.
    """
    given = canonical_weights(decoder) if weights is None else weights.items()
    save_shape(
        decoder.config,
        given,
        directory,
        dtype or next(decoder.parameters()).dtype,
        max_shard_bytes=max_shard_bytes,
    )


def save_shape(
    shape: DecoderConfig,
    weights: Iterable[tuple[str, Savable]],
    directory: Path,
    dtype: torch.dtype,
    *,
    max_shard_bytes: int = 5 * 10**9,
) -> None:
    """As `save_decoder`, of a decoder that is nowhere whole."""
    config = shape.to_hf() | {"dtype": str(dtype).removeprefix("torch."), "use_cache": True}
    generation = {"bos_token_id": config["bos_token_id"], "eos_token_id": config["eos_token_id"]}
    directory.mkdir(parents=True, exist_ok=True)
    save_weights(weights, directory, dtype, max_shard_bytes)
    write_json(
        directory / "generation_config.json",
        {key: value for key, value in generation.items() if value is not None},
    )
    write_json(directory / "config.json", config)


def save_weights(
    weights: Iterable[tuple[str, Savable]],
    directory: Path,
    dtype: torch.dtype,
    max_shard_bytes: int,
) -> None:
    shards = _shards(list(weights), dtype, max_shard_bytes)
    files = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    if len(files) == 1:
        files = [WEIGHTS]
    for file, shard in zip(files, shards, strict=True):
        # One shard in memory at a time; a copy, since safetensors refuses views that share memory.
        tensors = {name: weight.to("cpu", dtype, copy=True).contiguous() for name, weight in shard}
        with atomic_path(directory / file) as temporary:
            save_file(tensors, temporary, metadata={"format": "pt"})
    if len(shards) > 1:
        total = sum(tensor.numel() for shard in shards for _, tensor in shard)
        index = {
            "metadata": {"total_parameters": total, "total_size": total * dtype.itemsize},
            "weight_map": {
                name: file for file, shard in zip(files, shards, strict=True) for name, _ in shard
            },
        }
        write_json(directory / INDEX, index)
    remove_stale_weights(directory, {*files, *([INDEX] if len(shards) > 1 else [])})


def _shards(
    weights: list[tuple[str, Savable]], dtype: torch.dtype, max_bytes: int
) -> list[list[tuple[str, Savable]]]:
    shards: list[list[tuple[str, Savable]]] = [[]]
    used = 0
    for name, tensor in weights:
        size = tensor.numel() * dtype.itemsize
        if shards[-1] and used + size > max_bytes:
            shards.append([])
            used = 0
        shards[-1].append((name, tensor))
        used += size
    return shards


def remove_stale_weights(directory: Path, kept: set[str]) -> None:
    """What an earlier save with another number of shards left: a reader would prefer it, or double
    the disk."""
    for path in [
        *directory.glob("model-*-of-*.safetensors"),
        directory / WEIGHTS,
        directory / INDEX,
    ]:
        if path.name not in kept:
            path.unlink(missing_ok=True)
