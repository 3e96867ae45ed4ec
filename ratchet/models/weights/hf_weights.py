"""Read and write Hugging Face model directories (config.json, safetensors files).

The built-in decoder fuses matrices, but on disk and in a weight sync every weight has its canonical
Hugging Face name. The canonical tensors are *views* of consecutive rows of the fused ones, so
saving and sending them copies nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ratchet.config.model_shape.decoder_config import DecoderConfig
from ratchet.errors import ModelError
from ratchet.models.decoder import Decoder
from ratchet.models.layers.quantized import QuantizedMatrix
from ratchet.models.memory import require_memory
from ratchet.models.parallel.sharding import WHOLE, ModelShard
from ratchet.models.weights.tensor_files import save_tensors
from ratchet.models.weights.weight_layout import cut_blocks, list_pieces
from ratchet.utils import safe_read
from ratchet.utils.atomic_files import atomic_path, write_json
from ratchet.utils.object_store import stays_inside
from ratchet.utils.summarize import summarize_names

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_SHARD_BYTES = 5 * 10**9  # of a file with several weights
HEAD = "lm_head.weight"
# The scalar head of a reward or value model, see `ratchet.models.scalar_head`.
SCORE = "score.weight"
IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)  # a constant that old checkpoints carry


def canonical_weights(decoder: Decoder) -> Iterator[tuple[str, Tensor]]:
    """Yield (Hugging Face name, detached view into a parameter) of each weight once.

    A tied head and adapters are left out. The views of a quantized matrix have its dequantized
    values.
    """
    layout = list_pieces(decoder)
    for name, weight in decoder.named_weights():
        if name.endswith((".lora_A", ".lora_B")):
            continue
        for block in cut_blocks(
            layout[name],
            weight.contents if isinstance(weight, QuantizedMatrix) else weight.detach(),
        ):
            yield block.name, block.tensor


def load_weights(decoder: Decoder, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Copy every weight into its view in the decoder, converting dtype and device.

    Raises ModelError if weights are missing, unexpected or of the wrong shape. The decoder is then
    partly overwritten.
    """
    views = dict(canonical_weights(decoder))
    missing = set(views)
    unexpected: list[str] = []
    for name, tensor in weights:
        if name not in views:
            unexpected.append(name)
        elif views[name].shape != tensor.shape:
            raise ModelError(
                f"weight '{name}' has shape {_format_shape(tensor)}, but the config says "
                f"{_format_shape(views[name])}"
            )
        else:
            views[name].copy_(tensor)
            missing.discard(name)
    if missing:
        raise ModelError(f"weights are missing: {summarize_names(sorted(missing))}")
    if unexpected:
        raise ModelError(
            f"weights that this decoder has no place for: {summarize_names(unexpected)}"
        )


def _format_shape(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape))


# --- reading


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises ModelError if there is no file or no object."""
    try:
        content = safe_read.read_json(path)
    except FileNotFoundError:
        raise ModelError(f"{path.parent} is not a model directory: it has no {path.name}") from None
    except OSError as error:
        raise ModelError(f"{path} can't be read: {error.strerror}") from None
    except ValueError as error:
        raise ModelError(f"{path} can't be read: {error}") from None
    if not isinstance(content, dict):
        raise ModelError(f"{path} holds no JSON object")
    return content


def read_text_config(directory: Path) -> dict[str, Any]:
    """Return a model's config.json; of a model that reads media, the part on its language model.

    Raises ModelError like `read_json`.
    """
    config = read_json(directory / "config.json")
    return config.get("text_config") or config


def read_config(directory: Path, hf: Mapping[str, Any] | None = None) -> DecoderConfig:
    """Return the shape of a directory's model.

    hf: Content of `config.json` to use in place of the file's; None: the file's.

    Raises ModelError if the built-in decoder can't represent it.
    """
    generation = directory / "generation_config.json"
    return DecoderConfig.from_hf(
        read_json(directory / "config.json") if hf is None else hf,
        read_json(generation) if generation.exists() else None,
    )


def _read_index(directory: Path) -> dict[str, str]:
    """Return the file of each weight, by the index of a directory. Raises ModelError."""
    files: Any = read_json(directory / INDEX).get("weight_map", {})
    if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
        raise ModelError(
            f"{directory / INDEX} has no weight_map with file names: copy it from the original "
            "model"
        )
    for file in sorted(set(files.values())):
        if not stays_inside(file):
            raise ModelError(
                f"{directory / INDEX} names the file '{file:.80}', which is outside of the "
                "directory"
            )
    return files


@dataclass(frozen=True)
class WeightFiles:
    """The safetensors files of a directory, from which single weights or blocks can be read."""

    directory: Path
    files: Mapping[str, str]  # weight name -> file name

    @classmethod
    def find(cls, directory: Path) -> WeightFiles:
        """Return the files of a directory.

        Raises ModelError if there are none, if the index names a file that is missing, or if there
        are the files of two saves.
        """
        has_whole = (directory / WEIGHTS).exists()
        if (directory / INDEX).exists():
            files = _read_index(directory)
            names = sorted(set(files.values()))
            missing = next((name for name in names if not (directory / name).exists()), None)
            names_others = has_whole and WEIGHTS not in names
            if names_others and missing is None:
                raise ModelError(
                    f"{directory} has both {WEIGHTS} and the files of {INDEX}, and one of the two "
                    "is from an earlier save: remove that one"
                )
            if not names_others and missing is not None:
                raise ModelError(
                    f"{directory} is incomplete: {INDEX} names {missing}, which is missing"
                )
            if not names_others:
                return cls(directory, files)
            # transformers leaves the index of an earlier save in its place, without its files.
        if has_whole:
            with _open(directory / WEIGHTS) as weight_file:
                return cls(directory, dict.fromkeys(weight_file.keys(), WEIGHTS))
        pickled_names = [path.name for path in sorted(directory.glob("*.bin"))]
        hint = (
            f" (reading {summarize_names(pickled_names)} could run code: convert it to safetensors)"
            if pickled_names
            else ""
        )
        raise ModelError(f"{directory} has neither {WEIGHTS} nor {INDEX}{hint}")

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) of the named weights on the CPU, one at a time, file by file.

        Raises ModelError for a weight that two files hold, as the last one would replace the other.
        """
        wanted = set(names)
        read_from: dict[str, str] = {}
        for file in sorted({self.files[name] for name in wanted}):
            with _open(self.directory / file) as weight_file:
                for name in weight_file.keys():  # noqa: SIM118 (it is not a mapping)
                    if name not in wanted:
                        continue
                    if name in read_from:
                        raise ModelError(
                            f"{self.directory}: {read_from[name]} and {file} both hold '{name}': "
                            "copy the files from the original model again"
                        )
                    read_from[name] = file
                    yield name, weight_file.get_tensor(name)

    def headers(self) -> Iterator[tuple[str, tuple[int, ...], torch.dtype]]:
        """Yield (name, shape, dtype) of every weight, file by file, without reading the weights."""
        for file in sorted(set(self.files.values())):
            with _open(self.directory / file) as weight_file:
                for name in weight_file.keys():  # noqa: SIM118
                    tensor_slice = weight_file.get_slice(name)
                    shape = tuple(tensor_slice.get_shape())
                    yield (
                        name,
                        shape,
                        (tensor_slice[0:0] if shape else weight_file.get_tensor(name)).dtype,
                    )

    def block(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """Return a block of one weight on the CPU, without reading the other parts of the weight.

        Raises ModelError if there is no such weight, or if it is smaller than the block.
        """
        if name not in self.files:
            raise ModelError(f"{self.directory}: weights are missing: {name}")
        with _open(self.directory / self.files[name]) as weight_file:
            tensor_slice = weight_file.get_slice(name)
            shape = tensor_slice.get_shape()
            if len(shape) != len(sizes) or any(
                offset + size > total
                for offset, size, total in zip(offsets, sizes, shape, strict=True)
            ):
                ends = [offset + size for offset, size in zip(offsets, sizes, strict=True)]
                raise ModelError(
                    f"{self.directory}: weight '{name}' has shape {list(shape)}, which does not "
                    f"fit the sizes in config.json: a block ends at {ends}"
                )
            return tensor_slice[
                tuple(
                    slice(offset, offset + size)
                    for offset, size in zip(offsets, sizes, strict=True)
                )
            ]


def _open(path: Path) -> Any:
    try:
        safe_read.require_file(path)
        return safe_open(path, framework="pt", device="cpu")
    except OSError as error:
        raise ModelError(f"{path} can't be read: {error.strerror or error}") from None
    except SafetensorError as error:
        raise ModelError(f"{path} is damaged, or is not a safetensors file: {error}") from None


def load_decoder(
    directory: Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    hf: Mapping[str, Any] | None = None,
) -> Decoder:
    """Return the decoder of a directory.

    hf: Content of `config.json` to use in place of the file's; None: the file's.

    A reward model without `lm_head` is loaded as a decoder with a tied head. Raises ModelError if
    the directory is incomplete, or if the built-in decoder can't represent its model.
    """
    config = read_config(directory, hf)
    files = WeightFiles.find(directory)
    names = [name for name in files.files if name != SCORE and not name.endswith(IGNORED_SUFFIXES)]
    lacks_head = SCORE in files.files and HEAD not in files.files
    decoder = empty_decoder(
        replace(config, tied=True) if lacks_head else config, dtype=dtype, device=device
    )
    try:
        load_weights(decoder, _drop_tied_copy(decoder, files.read(names)))
    except ModelError as error:
        raise ModelError(f"{directory}: {error}") from None
    return decoder


def _drop_tied_copy(
    decoder: Decoder, weights: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights without the copy of a tied head, which some tools save.

    Raises ModelError if the copy differs from the embedding.
    """
    tied_names = {"model.embed_tokens.weight", HEAD} if decoder.config.tied else set()
    tied_tensors: list[Tensor] = []
    for name, tensor in weights:
        if name in tied_names:
            tied_tensors.append(tensor)
        if name != HEAD or not tied_names:
            yield name, tensor
    if len(tied_tensors) == 2 and not torch.equal(*tied_tensors):
        raise ModelError(
            f"{HEAD} differs from the embedding, although config.json sets tie_word_embeddings"
        )


def empty_decoder(
    config: DecoderConfig,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    shard: ModelShard = WHOLE,
) -> Decoder:
    """Return a decoder with uninitialised weights, allocated directly in this dtype and device.

    Raises ModelError if the weights of a whole model exceed the device's memory.
    """
    if shard == WHOLE:
        require_memory(config, dtype, device)
    default_dtype = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return Decoder(config, shard)
    finally:
        torch.set_default_dtype(default_dtype)


# --- writing


class SavableTensor(Protocol):
    """A tensor, or an object that computes one when its file is written."""

    def numel(self) -> int: ...
    def to(self, device: str, dtype: torch.dtype, *, copy: bool) -> Tensor: ...


def save_decoder(
    decoder: Decoder,
    directory: Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    weights: Mapping[str, SavableTensor] | None = None,
) -> None:
    """Write a directory that `load_decoder`, transformers and vLLM can load.

    Each file is written atomically.

    Args:
        dtype: Type of the weights in the files; None: that of the decoder.
        max_shard_bytes: Maximum size of a file, unless a single weight is larger.
        weights: All weights by canonical name; None: the weights of the decoder.
    """
    named_weights = canonical_weights(decoder) if weights is None else weights.items()
    save_model_directory(
        decoder.config,
        named_weights,
        directory,
        dtype or next(decoder.parameters()).dtype,
        max_shard_bytes=max_shard_bytes,
    )


def save_model_directory(
    shape: DecoderConfig,
    weights: Iterable[tuple[str, SavableTensor]],
    directory: Path,
    dtype: torch.dtype,
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write a model directory like `save_decoder`, from a shape and weights, not a decoder."""
    config = shape.to_hf() | {"dtype": str(dtype).removeprefix("torch."), "use_cache": True}
    generation = {
        "bos_token_id": config["bos_token_id"],
        **shape.generation,
        "eos_token_id": config["eos_token_id"],
    }
    directory.mkdir(parents=True, exist_ok=True)
    save_weights(weights, directory, dtype, max_shard_bytes)
    write_json(
        directory / "generation_config.json",
        {key: value for key, value in generation.items() if value is not None},
    )
    write_json(directory / "config.json", config)


def save_weights(
    weights: Iterable[tuple[str, SavableTensor]],
    directory: Path,
    dtype: torch.dtype,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write weights as safetensors files, and remove old ones. Several files get an index file.

    max_shard_bytes: maximum size of a file, unless a single weight is larger.
    """
    groups = _group_by_file(list(weights), dtype, max_shard_bytes)
    files = [f"model-{i:05}-of-{len(groups):05}.safetensors" for i in range(1, len(groups) + 1)]
    if len(files) == 1:
        files = [WEIGHTS]
    for file, group in zip(files, groups, strict=True):
        # Only one file's weights are in memory at a time. They are copied, because safetensors
        # does not accept views that share memory.
        tensors = {name: weight.to("cpu", dtype, copy=True).contiguous() for name, weight in group}
        with atomic_path(directory / file) as temporary:
            save_tensors(tensors, temporary, metadata={"format": "pt"})
    if len(files) > 1:
        total = sum(tensor.numel() for group in groups for _, tensor in group)
        index = {
            "metadata": {"total_parameters": total, "total_size": total * dtype.itemsize},
            "weight_map": {
                name: file for file, group in zip(files, groups, strict=True) for name, _ in group
            },
        }
        write_json(directory / INDEX, index)
    remove_stale_weights(directory, {*files, *([INDEX] if len(files) > 1 else [])})


def _group_by_file(
    weights: list[tuple[str, SavableTensor]], dtype: torch.dtype, max_bytes: int
) -> list[list[tuple[str, SavableTensor]]]:
    """Return the weights of each file. A file has at most `max_bytes`, or a single weight."""
    groups: list[list[tuple[str, SavableTensor]]] = [[]]
    used_bytes = 0
    for name, tensor in weights:
        size = tensor.numel() * dtype.itemsize
        if groups[-1] and used_bytes + size > max_bytes:
            groups.append([])
            used_bytes = 0
        groups[-1].append((name, tensor))
        used_bytes += size
    return groups


def remove_stale_weights(directory: Path, kept_names: set[str]) -> None:
    """Remove weight files of an earlier save that are not in `kept_names`.

    Otherwise a reader might prefer them, and they would take disk space.
    """
    for path in [
        *directory.glob("model-*-of-*.safetensors"),
        directory / WEIGHTS,
        directory / INDEX,
    ]:
        if path.name not in kept_names:
            path.unlink(missing_ok=True)
