"""Read and write the formats of model weights on disk.

Three formats can be read and written: Hugging Face's safetensors, torch's distributed checkpoint
(DCP) and Megatron-core's checkpoint. A learner's checkpoint can only be read. Weights are read
block by block under their canonical names, which are Hugging Face's, and written file by file. In
all formats, `config.json`, the tokenizer and other files of a model lie beside the weights, under
the names that Hugging Face gives them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from ratchet.checkpoint.sharded import BlockFiles
from ratchet.commands.convert import megatron_format
from ratchet.commands.convert.dcp import INDEX as DCP_INDEX
from ratchet.commands.convert.dcp import Chunk, DcpFiles, write_chunks, write_index
from ratchet.errors import CheckpointError, ModelError
from ratchet.models.convert.dimensions import Dimensions, count_mtp_layers, find_mtp_layers
from ratchet.models.convert.megatron import MegatronShard, megatron_layout
from ratchet.models.convert.packed_experts import (
    find_packed_name,
    pack_shapes,
    read_packed_experts,
    read_single_experts,
)
from ratchet.models.convert.tables import list_mtp_copies
from ratchet.models.model_source import ReadBlock
from ratchet.models.weights.hf_weights import (
    HEAD,
    IGNORED_SUFFIXES,
    INDEX,
    WEIGHTS,
    WeightFiles,
)
from ratchet.models.weights.tensor_files import save_tensors
from ratchet.models.weights.weight_layout import WeightPiece
from ratchet.protocols import Shard
from ratchet.utils.atomic_files import atomic_path, write_json
from ratchet.utils.summarize import summarize_names

EMBEDDING = "model.embed_tokens.weight"
# Prefixes of the names of a causal model's weights. A checkpoint may hold other tensors as well.
WEIGHT_PREFIXES = ("model.", "lm_head.", "score.")
LAYER = re.compile(r"model\.layers\.(\d+)\.")
Config = Mapping[str, Any]  # the content of config.json
Record = Mapping[str, Any]  # a written tensor's description as JSON values, for `finish`


@dataclass(frozen=True)
class Weights:
    """The weights of a model, by canonical name."""

    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, torch.dtype]
    read: ReadBlock
    # Names of ignored weights: constants of old checkpoints, and layers that config.json lacks.
    ignored: tuple[str, ...] = ()

    def read_whole(self, name: str) -> Tensor:
        """Read a whole weight."""
        shape = self.shapes[name]
        return self.read(name, (0,) * len(shape), shape)


@dataclass(frozen=True)
class WriteEntry:
    """A chunk of a tensor to write; usually the chunk is the whole tensor."""

    key: str  # name of the tensor in the written format
    shape: tuple[int, ...]  # of the whole tensor
    offsets: tuple[int, ...]  # start of the chunk in the tensor, per dimension
    sizes: tuple[int, ...]  # shape of the chunk
    dtype: torch.dtype
    weights: tuple[str, ...]  # canonical names of the weights that the chunk is made of
    make: Callable[[], Tensor]  # reads the weights and returns the chunk

    @property
    def bytes(self) -> int:
        """Return the size of the chunk in bytes."""
        return torch.Size(self.sizes).numel() * self.dtype.itemsize


class ReadableWeightFormat(Protocol):
    """A format of weights that can be read."""

    def is_in(self, directory: Path) -> bool:
        """Return True if the directory holds weights in this format."""
        ...

    def open(self, directory: Path, config: Config) -> Weights:
        """Return the weights.

        Raises CheckpointError or ModelError if weights are missing or damaged.
        """
        ...


class WeightFormat(ReadableWeightFormat, Protocol):
    """A format of weights that can be read and written."""

    def entries(self, weights: Weights, config: Config) -> Iterator[WriteEntry]:
        """Yield the entries to write.

        Raises ModelError if a weight is missing, or has no counterpart in this format.
        """
        ...

    def name_file(self, number: int, n_files: int) -> str:
        """Return the name of file `number`, counted from 0, of `n_files` files."""
        ...

    def write(self, path: Path, entries: Sequence[WriteEntry]) -> list[Record]:
        """Write entries to one file, and return their records for `finish`."""
        ...

    def finish(self, directory: Path, records: Sequence[Record], config: Config) -> None:
        """Complete the directory once all files are written, for example with an index."""
        ...


class HuggingFace:
    """The format of Hugging Face: safetensors files, with an index if there are several."""

    def is_in(self, directory: Path) -> bool:
        return (directory / WEIGHTS).exists() or (directory / INDEX).exists()

    def open(self, directory: Path, config: Config) -> Weights:
        files = WeightFiles.find(directory)
        headers = list(files.headers())
        shapes = {name: shape for name, shape, _ in headers}
        return _select_canonical(
            Weights(shapes, {name: dtype for name, _, dtype in headers}, files.block), config
        )

    def entries(self, weights: Weights, config: Config) -> Iterator[WriteEntry]:
        return _yield_whole_weights(weights)

    def name_file(self, number: int, n_files: int) -> str:
        return WEIGHTS if n_files == 1 else f"model-{number + 1:05}-of-{n_files:05}.safetensors"

    def write(self, path: Path, entries: Sequence[WriteEntry]) -> list[Record]:
        with atomic_path(path) as draft:
            save_tensors(
                {entry.key: entry.make().contiguous() for entry in entries},
                draft,
                metadata={"format": "pt"},
            )
        return [{"key": entry.key, "file": path.name, "bytes": entry.bytes} for entry in entries]

    def finish(self, directory: Path, records: Sequence[Record], config: Config) -> None:
        if {record["file"] for record in records} != {WEIGHTS}:
            total = {"total_size": sum(record["bytes"] for record in records)}
            write_json(
                directory / INDEX,
                {"metadata": total, "weight_map": {r["key"]: r["file"] for r in records}},
            )


class Dcp:
    """The format of torch.distributed.checkpoint."""

    def is_in(self, directory: Path) -> bool:
        return (directory / DCP_INDEX).exists() and not (
            directory / megatron_format.FORMAT
        ).exists()

    def open(self, directory: Path, config: Config) -> Weights:
        """Return the weights.

        A trainer may have saved its model under a name, beside other state: `{"model": ...,
        "optim": ...}`. The prefix "model." is then found in the shortest key that ends with the
        embedding's name.
        """
        files = DcpFiles(directory)
        prefix = min(
            (key.removesuffix(EMBEDDING) for key in files.tensors if key.endswith(EMBEDDING)),
            key=len,
            default=None,
        )
        keys = {
            key.removeprefix(prefix or ""): key
            for key in files.tensors
            if prefix is None
            or (key.startswith(prefix) and key.removeprefix(prefix).startswith(WEIGHT_PREFIXES))
        }

        def read(name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
            return files.block(keys[name], offsets, sizes)

        shapes = {name: files.shape(key) for name, key in keys.items()}
        return _select_canonical(
            Weights(shapes, {name: files.dtype(key) for name, key in keys.items()}, read), config
        )

    def entries(self, weights: Weights, config: Config) -> Iterator[WriteEntry]:
        return _yield_whole_weights(weights)

    def name_file(self, number: int, n_files: int) -> str:
        return f"__{number}_0.distcp"

    def write(self, path: Path, entries: Sequence[WriteEntry]) -> list[Record]:
        shards = (
            Shard(entry.key, entry.shape, entry.offsets, entry.make().reshape(entry.sizes))
            for entry in entries
        )
        return [
            {**asdict(chunk), "dtype": str(chunk.dtype).removeprefix("torch.")}
            for chunk in write_chunks(path, shards)
        ]

    def finish(self, directory: Path, records: Sequence[Record], config: Config) -> None:
        write_index(directory, (_parse_chunk(record) for record in records))


class Megatron(Dcp):
    """The format of Megatron-core: DCP files with Megatron's names of tensors and extra files."""

    def is_in(self, directory: Path) -> bool:
        return (directory / megatron_format.FORMAT).exists()

    def open(self, directory: Path, config: Config) -> Weights:
        dimensions = _read_dimensions(config, DcpFiles(directory).tensors)
        files = megatron_format.MegatronFiles(directory, dimensions)
        if not dimensions.has_packed_experts:
            copies = list_mtp_copies(dimensions)
            names = {name: name for name in files.shapes} | copies

            def read(name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
                return files.block(names[name], offsets, sizes)

            shapes = {name: files.shapes[stored] for name, stored in names.items()}
            return Weights(shapes, {name: files.dtype(names[name]) for name in names}, read)
        return Weights(
            pack_shapes(files.shapes, dimensions.experts),
            {find_packed_name(name): files.dtype(name) for name in files.shapes},
            read_packed_experts(files.block),
        )

    def entries(self, weights: Weights, config: Config) -> Iterator[WriteEntry]:
        dimensions = _read_dimensions(config, weights.shapes)
        weights = _drop_mtp_copies(weights, dimensions)
        layout = megatron_layout(dimensions, MegatronShard())
        expected = {piece.name: piece.shape for pieces in layout.values() for piece in pieces}
        read, find_name = weights.read, str
        if dimensions.has_packed_experts:
            expected = pack_shapes(expected, dimensions.experts)
            read, find_name = read_single_experts(read), find_packed_name
        _check_weights(weights, expected)
        for parameter, pieces in layout.items():
            shape = (pieces[-1].rows.stop, *pieces[0].shape[1:])
            names = tuple(dict.fromkeys(find_name(piece.name) for piece in pieces))
            for location in megatron_format.list_written_locations(parameter, dimensions):
                yield WriteEntry(
                    location.key,
                    (*location.stack_sizes, *shape),
                    (*location.index, *(0,) * len(shape)),
                    (*(1 for _ in location.stack_sizes), *shape),
                    weights.dtypes[names[0]],
                    names,
                    lambda pieces=pieces: _join_pieces(read, pieces),
                )

    def finish(self, directory: Path, records: Sequence[Record], config: Config) -> None:
        dimensions = _read_dimensions(config, [record["key"] for record in records])
        megatron_format.write_format(directory, dimensions)
        write_index(
            directory,
            (_parse_chunk(record) for record in records),
            megatron_format.list_empty_states(dimensions),
        )


class LearnerBlocks:
    """The format of a distributed learner's checkpoint, with optimizer state beside the weights.

    It can only be read.
    """

    def is_in(self, directory: Path) -> bool:
        return any(directory.glob("rank-*.json"))

    def open(self, directory: Path, config: Config) -> Weights:
        blocks = BlockFiles(directory)
        shapes = {
            name: shape for name, shape in blocks.shapes.items() if name.startswith(WEIGHT_PREFIXES)
        }
        # One element of each weight is read to learn its dtype.
        dtypes = {
            name: blocks.read(name, (0,) * len(shape), (1,) * len(shape)).dtype
            for name, shape in shapes.items()
        }
        return _select_canonical(Weights(shapes, dtypes, blocks.read), config)


FORMATS: Mapping[str, WeightFormat] = {"hf": HuggingFace(), "megatron": Megatron(), "dcp": Dcp()}
READABLE_FORMATS: Mapping[str, ReadableWeightFormat] = {**FORMATS, "learner": LearnerBlocks()}


def detect_format(directory: Path) -> str:
    """Return the name of the format in a directory. Raises CheckpointError if there is none."""
    format_name = next(
        (name for name, readable in READABLE_FORMATS.items() if readable.is_in(directory)), None
    )
    if format_name is None:
        raise CheckpointError(
            f"{directory} holds no weights of a model: neither {WEIGHTS} (Hugging Face), nor "
            f"{megatron_format.FORMAT} (Megatron), "
            f"{DCP_INDEX} (torch.distributed.checkpoint) or rank-0.json (a learner's checkpoint)"
        )
    return format_name


def _yield_whole_weights(weights: Weights) -> Iterator[WriteEntry]:
    """Yield one entry per weight, under its canonical name."""
    for name, shape in weights.shapes.items():
        offsets = (0,) * len(shape)
        yield WriteEntry(
            name,
            shape,
            offsets,
            shape,
            weights.dtypes[name],
            (name,),
            lambda name=name: weights.read_whole(name),
        )


def _join_pieces(read: ReadBlock, pieces: Sequence[WeightPiece]) -> Tensor:
    """Read the pieces of a parameter and concatenate them by rows."""
    blocks = [
        read(piece.name, piece.offsets, (len(piece.rows), *piece.shape[1:])) for piece in pieces
    ]
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks)


def _parse_chunk(record: Record) -> Chunk:
    """Return the chunk that a JSON record describes."""
    tuples = {key: tuple(value) for key, value in record.items() if isinstance(value, list)}
    return Chunk(**{**record, **tuples, "dtype": getattr(torch, record["dtype"])})


def _read_dimensions(config: Config, names: Iterable[str]) -> Dimensions:
    """Return the dimensions of a model, with MTP layers only if its weights have them.

    names: as of `find_mtp_layers`.
    """
    return replace(Dimensions.from_hf(config), mtp_layers=find_mtp_layers(config, names))


def _drop_mtp_copies(weights: Weights, dimensions: Dimensions) -> Weights:
    """Return the weights without the copies of embedding and head that MTP layers have.

    Megatron's MTP layers share both. Raises ModelError if a copy differs from its original.
    """
    copies = list_mtp_copies(dimensions)
    for name, original in copies.items():
        is_stored = {name, original} <= weights.shapes.keys()
        if is_stored and not torch.equal(weights.read_whole(name), weights.read_whole(original)):
            raise ModelError(
                f"{name} differs from {original}, which Megatron's layers for multi-token "
                "prediction share: convert a checkpoint in which it is a copy"
            )
    shapes = {name: shape for name, shape in weights.shapes.items() if name not in copies}
    return replace(weights, shapes=shapes)


def _select_canonical(weights: Weights, config: Config) -> Weights:
    """Return the weights without those that the model does not use.

    These are constants of old checkpoints, layers that config.json does not count, and a tied head,
    which is a copy of the embedding.

    Raises ModelError if a tied head differs from the embedding.
    """
    n_layers = config.get("num_hidden_layers", 0) + count_mtp_layers(config)
    ignored = [
        name
        for name in weights.shapes
        if name.endswith(IGNORED_SUFFIXES)
        or ((layer := LAYER.match(name)) and int(layer[1]) >= n_layers)
    ]
    dropped = set(ignored)
    if config.get("tie_word_embeddings") and {HEAD, EMBEDDING} <= weights.shapes.keys():
        if not torch.equal(weights.read_whole(HEAD), weights.read_whole(EMBEDDING)):
            raise ModelError(
                f"{HEAD} differs from the embedding, but config.json says "
                "tie_word_embeddings=true: set it to false"
            )
        dropped.add(HEAD)
    shapes = {name: shape for name, shape in weights.shapes.items() if name not in dropped}
    return Weights(shapes, weights.dtypes, weights.read, tuple(ignored))


def _check_weights(weights: Weights, expected_shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ModelError unless the names and shapes are exactly as expected."""
    if missing := [name for name in expected_shapes if name not in weights.shapes]:
        raise ModelError(f"weights are missing: {summarize_names(missing)}")
    if unknown := [name for name in weights.shapes if name not in expected_shapes]:
        raise ModelError(f"Megatron has no place for these weights: {summarize_names(unknown)}")
    for name, shape in expected_shapes.items():
        if weights.shapes[name] != shape:
            raise ModelError(
                f"weight '{name}' has shape {weights.shapes[name]}, but config.json implies {shape}"
            )
