"""Pass adapters to vLLM's workers as directories in peft's format.

The workers check a directory's checksum, then vLLM loads it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from shutil import rmtree

import torch
from safetensors import safe_open
from torch import Tensor
from xxhash import xxh3_128_hexdigest

from ratchet.config.model_shape.lora_targets import EXPERTS
from ratchet.errors import ModelError
from ratchet.models.lora.decoder import Adapter
from ratchet.models.lora.experts import BASE_LAYER, strip_base_layers
from ratchet.models.lora.files import CONFIG, WEIGHTS, StoredAdapter, save_adapter
from ratchet.models.weights.weight_layout import PEFT_PREFIX
from ratchet.protocols import Shard

# The maximum ranks of adapters with which vLLM can be started.
SUPPORTED_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
# The last part of the paths of adapters of fused experts: gate_up_proj, down_proj.
FUSED_LAYERS = (BASE_LAYER, "experts")


class AdapterSender:
    """The sender of adapters, which collects their weights and writes them to files.

    The files of a push stay until the next push has been loaded, as vLLM may read them again.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.adapter: Adapter | None = None
        self.loaded_path: Path | None = None
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._tensors: dict[str, Tensor] = {}
        self._n_missing_by_weight: dict[str, int] = {}  # number of elements not yet added
        self._n_saved = 0

    def expect(self, adapter: Adapter | None, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Begin a push.

        adapter: the pushed adapter; None: the push has none.
        shapes: shapes of the adapter's weights, by peft's names.
        """
        self.adapter = adapter
        self._shapes = dict(shapes)
        self._tensors = {}
        self._n_missing_by_weight = {
            name: torch.Size(shape).numel() for name, shape in shapes.items()
        }

    def add(self, shard: Shard) -> None:
        """Store a shard. Raises ModelError if its weight was not announced with this shape."""
        if self._shapes.get(shard.name) != tuple(shard.shape):
            raise ModelError(
                f"weight '{shard.name}' {shard.shape} of an adapter was sent, but was not "
                "announced with this name and shape"
            )
        target = self._tensors.setdefault(shard.name, torch.empty(shard.shape, dtype=torch.float32))
        for axis, (offset, size) in enumerate(zip(shard.offsets, shard.tensor.shape, strict=True)):
            target = target.narrow(axis, offset, size)
        target.copy_(shard.tensor)
        self._n_missing_by_weight[shard.name] -= shard.tensor.numel()

    def write(self) -> tuple[Path, str] | None:
        """Write the pushed adapter and return (directory, checksum of the weights' file).

        Returns None if no adapter was sent. Raises ModelError for an incomplete one.
        """
        if self.adapter is None:
            return None
        if incomplete_names := [name for name, count in self._n_missing_by_weight.items() if count]:
            raise ModelError(
                f"a pushed adapter must have all its weights, and '{incomplete_names[0]}' is "
                "missing or incomplete"
            )
        # peft's names end with MODULE.lora_A.weight or MODULE.lora_B.weight.
        names = {name.split(".")[-3] for name in self._tensors}
        target_modules = sorted(names.difference(FUSED_LAYERS))
        return self._save(self.adapter, target_modules, self._tensors)

    def write_stored(self, stored: StoredAdapter) -> tuple[Path, str]:
        """Write an adapter that was read from a directory.

        Later pushes do not remove these files.

        Return (directory, checksum of the weights' file).
        """
        return self._save(stored.adapter, stored.target_modules, stored.weights)

    def _save(
        self, adapter: Adapter, target_modules: Sequence[str], weights: Mapping[str, Tensor]
    ) -> tuple[Path, str]:
        self._n_saved += 1
        path = self.directory / f"adapter-{self._n_saved}"
        save_adapter(path, adapter, target_modules, weights)
        return path, xxh3_128_hexdigest((path / WEIGHTS).read_bytes())

    def mark_loaded(self, path: Path) -> None:
        """Record that the workers have loaded `path`, and remove the previous push's files."""
        if self.loaded_path is not None:
            rmtree(self.loaded_path, ignore_errors=True)
        self.loaded_path = path


def check_expert_matrices(names: Collection[str]) -> None:
    """Raise ModelError if an adapter has only some of an expert's matrices, or fused parameters.

    vLLM loads only adapters of all of them.

    Args:
        names: peft's names of the adapter's weights.
    """
    adapted = {name.split(".")[-3] for name in names if ".experts." in name}
    for matrices in EXPERTS.values():
        missing = [name for name in matrices if name not in adapted]
        if missing and not adapted.isdisjoint(matrices):
            raise ModelError(
                f"the adapter has no {' and no '.join(missing)} of its experts, and vLLM loads an "
                "adapter of all matrices of an expert only. Add them to lora.target_modules"
            )
    paths = list_fused_paths(names)
    for experts in sorted(map(strip_base_layers, paths)):
        if not paths.issuperset({experts, f"{experts}.{BASE_LAYER}"}):
            raise ModelError(
                f"the adapter has one of the fused parameters of '{experts}', and vLLM loads "
                "adapters of both only. Set "
                "lora.target_parameters=[mlp.experts.gate_up_proj, mlp.experts.down_proj]"
            )


def list_fused_paths(names: Iterable[str]) -> set[str]:
    """Return the paths of the adapters of fused experts, from peft's names of weights."""
    paths = {name.removeprefix(PEFT_PREFIX).rpartition(".lora_")[0] for name in names}
    return {path for path in paths if path.rpartition(".")[2] in FUSED_LAYERS}


def _number_no_layer(path: str) -> str:
    return re.sub(r"\.\d+\.", ".*.", path)


def has_fused_experts(directory: Path) -> bool:
    """Return True if an adapter in a directory is for fused experts."""
    return bool(json.loads((directory / CONFIG).read_text()).get("target_parameters"))


def explain_unknown_experts(path: str, modules: Iterable[str]) -> str:
    """Return why vLLM would not use an adapter of fused experts; "" if it would.

    vLLM skips adapters of modules that it does not have, as it must where its workers have other
    layers.

    Args:
        path: The adapter's directory.
        modules: Paths of a worker's modules.
    """
    known = {_number_no_layer(module) for module in modules}
    with safe_open(Path(path) / WEIGHTS, framework="pt") as file:
        for fused in sorted(map(strip_base_layers, list_fused_paths(file.keys()))):
            if _number_no_layer(fused) not in known:
                return (
                    f"vLLM's model has no '{fused}', so it would not use the adapter of these "
                    "experts. Set generator.kind=hf, or remove lora.target_parameters"
                )
    return ""


def explain_adapter_damage(path: str, checksum: str) -> str:
    """Return the description of a damaged adapter file; "" if the checksum is right."""
    try:
        actual = xxh3_128_hexdigest((Path(path) / WEIGHTS).read_bytes())
    except OSError as error:
        return f"{path} can't be read: {error}"
    return (
        ""
        if actual == checksum
        else f"the adapter in {path} doesn't have the checksum that it was sent with"
    )
