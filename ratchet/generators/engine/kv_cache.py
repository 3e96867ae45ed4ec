"""The KV cache: keys and values of running requests, one slot per request, tokens in order.

R = slots, K = key/value heads, C = capacity of a slot in tokens, D = head_dim, N = tokens that are
written at once.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

from ratchet.config.model_shape.decoder_config import DecoderConfig
from ratchet.utils.datasheets import USABLE_MEMORY_SHARE

Window = tuple[Tensor, Tensor]  # (keys, values) of the first tokens of the first slots
# Scores and their softmax do not depend on padding if the length is a multiple of this.
STRIDE = 16
# Minimum length * head_dim of an attention product. Below 400 multiplications, PyTorch's `bmm` uses
# a plain loop, which rounds differently from BLAS; 512 is the next power of two.
MIN_MULTIPLICATIONS = 512
MIN_SHARE = 1 / 16  # of free GPU memory, which the cache has at least


class KVCache:
    """The keys and values of all layers, in slots.

    Slots and their capacity grow by doubling, so growth copies less than twice the stored size in
    total. Attention reads multiples of `stride` tokens (a power of two), so a slot has at least
    that capacity.
    The memory must always hold finite numbers, because attention reads beyond a request's end with
    weight 0, and 0 * NaN is NaN.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        max_rounded_slots: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.config = config
        # The number of slots is rounded up to a power of two, but at most to this number. If more
        # are needed, exactly that many are allocated.
        self.max_rounded_slots = max_rounded_slots
        self.dtype = dtype
        self.device = device
        self.stride = max(
            STRIDE, _round_up_to_power_of_two(-(-MIN_MULTIPLICATIONS // config.head_dim))
        )
        self.bytes_per_token = (
            2 * config.n_layers * config.n_kv_heads * config.head_dim * dtype.itemsize
        )
        self.generation = 0  # a number that is new whenever the memory is
        self.clear()

    def clear(self) -> None:
        """Drop all slots and their memory."""
        self.n_slots = self.capacity = 0
        self.generation += 1
        self.keys: list[Tensor] = []  # [R, K, C, D] by layer
        self.values: list[Tensor] = []
        self._windows: dict[tuple[int, int], list[Window]] = {}

    def plan_size(self, n_slots: int, length: int) -> tuple[int, int]:
        """Return (slots, capacity) after `reserve(n_slots, length)`."""
        n_slots = max(
            self.n_slots, min(_round_up_to_power_of_two(n_slots), self.max_rounded_slots), n_slots
        )
        return n_slots, max(self.capacity, self.stride, _round_up_to_power_of_two(length))

    def get_bytes(self, n_slots: int, length: int) -> int:
        """Return the cache's size in bytes after `reserve(n_slots, length)`."""
        n_slots, capacity = self.plan_size(n_slots, length)
        return n_slots * capacity * self.bytes_per_token

    def reserve(self, n_slots: int, length: int) -> None:
        """Make room for `n_slots` slots of `length` tokens; stored values stay."""
        n_slots, capacity = self.plan_size(n_slots, length)
        if (n_slots, capacity) == (self.n_slots, self.capacity):
            return
        shape = (n_slots, self.config.n_kv_heads, capacity, self.config.head_dim)
        for store in (self.keys, self.values):
            for layer in range(self.config.n_layers):
                grown_store = torch.zeros(shape, dtype=self.dtype, device=self.device)
                if layer < len(store):
                    grown_store[: self.n_slots, :, : self.capacity] = store[layer]
                    store[layer] = grown_store
                else:
                    store.append(grown_store)
        self.n_slots, self.capacity = n_slots, capacity
        self.generation += 1
        self._windows.clear()

    def get_window(self, n_slots: int, length: int) -> list[Window]:
        """Return views of the first `length` tokens of the first `n_slots` slots, by layer.

        Each is (keys, values), both [n_slots * K, length, D]. The last window is cached, because
        building the views takes a noticeable part of a small model's decoding step.
        """
        if (n_slots, length) not in self._windows:
            stores = zip(self.keys, self.values, strict=True)
            views = [
                (
                    keys[:n_slots, :, :length].flatten(0, 1),
                    values[:n_slots, :, :length].flatten(0, 1),
                )
                for keys, values in stores
            ]
            self._windows = {(n_slots, length): views}
        return self._windows[n_slots, length]

    def copy_slots(self, sources: Tensor, targets: Tensor, length: int) -> None:
        """Copy the first `length` tokens of the source slots to the target slots.

        `sources` and `targets` are int64 [n], and disjoint.
        """
        for store in (*self.keys, *self.values):
            used_part = store[:, :, :length]
            used_part.index_copy_(0, targets, used_part.index_select(0, sources))

    def erase(self, slots: list[int]) -> None:
        """Fill slots with zeros, so that they hold finite numbers again."""
        for store in (*self.keys, *self.values) if slots else ():
            store.index_fill_(0, torch.tensor(slots, device=self.device), 0.0)

    def write(
        self, layer: int, slots_N: Tensor, positions_N: Tensor, k_NKD: Tensor, v_NKD: Tensor
    ) -> None:
        """Store keys and values at (slot, position) pairs (both int64 [N], all pairs distinct)."""
        self.keys[layer].transpose(1, 2).index_put_((slots_N, positions_N), k_NKD)
        self.values[layer].transpose(1, 2).index_put_((slots_N, positions_N), v_NKD)


def _round_up_to_power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()


def get_default_kv_bytes(device: torch.device, reserved: int = 0) -> int:
    """Return the default bytes of the KV cache: half of free GPU memory, or a quarter of RAM.

    reserved: bytes of GPU memory that are free now and not for the cache. At least a 16th of the
        free memory is for the cache.
    """
    if device.type in ("cuda", "xpu"):
        free = _get_free_bytes(device)
        return max((free - reserved) // 2, int(free * MIN_SHARE))
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4


def get_stage_kv_bytes(device: torch.device, reserved: int) -> int:
    """Return the bytes of the KV cache beside learners that take `reserved` bytes of free memory.

    The allocator cannot use all memory, so a share of the free memory is left. At least a 16th of
    it is for the cache.
    """
    free = _get_free_bytes(device)
    return max(int(free * USABLE_MEMORY_SHARE) - reserved, int(free * MIN_SHARE))


def _get_free_bytes(device: torch.device) -> int:
    """Return the device memory that this process can still use."""
    module = torch.get_device_module(device)
    # It can also use what its tensors have freed and PyTorch keeps.
    kept = module.memory_reserved(device) - module.memory_allocated(device)
    return module.mem_get_info(device)[0] + kept
