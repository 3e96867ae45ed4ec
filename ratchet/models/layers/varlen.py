"""Attention over packed sequences by one kernel, which reads their lengths: no padding, no masks.

PyTorch has it for CUDA, in half precision (`torch.nn.attention.varlen`, FlashAttention-2:
arXiv:2307.08691). `PackedAttention` uses it where it is there, and else pads the sequences.

T = tokens, S = sequences, H = query heads, K = key/value heads, D = head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ratchet.errors import ConfigError
from ratchet.utils.transfer import upload

# The kernel takes heads of at most this many numbers, a multiple of the second.
MAX_HEAD_DIM = 256
HEAD_DIM_MULTIPLE = 8
# The probe: lengths of its sequences, heads of queries, keys and values, and numbers of a head.
PROBE_LENGTHS = (1, 3, 20)
PROBE_HEADS = (4, 2, 2)
PROBE_HEAD_DIM = 64
# Largest difference from padded attention in bfloat16, whose rounding errors are 2^-8 of a number.
PROBE_TOLERANCE = 0.05


def choose_varlen(choice: Literal["auto", "padded", "varlen"], device: torch.device) -> bool:
    """Return True if packed sequences attend by the kernel for variable lengths.

    Raises:
        ConfigError: `choice` is "varlen", which this device or this PyTorch does not have.
    """
    if choice == "varlen" and not has_varlen(device):
        raise ConfigError(
            f"learner.attention=varlen, but PyTorch {torch.__version__} has no such kernel for "
            f"{device}. Set learner.attention=auto"
        )
    return choice != "padded" and has_varlen(device)


@cache
def has_varlen(device: torch.device) -> bool:
    """True if the kernel runs on this device, and agrees with padded attention on a few tokens."""
    if device.type != "cuda":
        return False
    generator = torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(sum(PROBE_LENGTHS), n_heads, PROBE_HEAD_DIM, generator=generator).to(device)
        for n_heads in PROBE_HEADS
    ]
    try:
        varlen = VarlenAttention(PROBE_LENGTHS, device)
        computed = _attend_with_gradients(varlen.attend, [x.bfloat16() for x in inputs])
    # What is missing shows in many ways: no module, other arguments, no kernel for this GPU.
    except (ImportError, TypeError, ValueError, RuntimeError, AttributeError):
        return False
    expected = _attend_with_gradients(partial(attend_padded, PROBE_LENGTHS), inputs)
    return all(
        bool((x - reference).abs().max() <= PROBE_TOLERANCE * reference.abs().max())
        for x, reference in zip(computed, expected, strict=True)
    )


def _attend_with_gradients(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor], inputs: Sequence[Tensor]
) -> list[Tensor]:
    """Return the output, and the gradients of queries, keys and values, in float32.

    inputs: queries, keys and values.
    """
    q, k, v = (x.requires_grad_() for x in inputs)
    out = attend(q, k, v)
    gradients = torch.autograd.grad(out.float().square().sum(), (q, k, v))
    return [x.float() for x in (out, *gradients)]


def attend_padded(lengths: Sequence[int], q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
    """Return the attention of each sequence alone, by PyTorch's ordinary function."""
    parts = []
    for q, k, v in zip(*(x.split(list(lengths)) for x in (q_THD, k_TKD, v_TKD)), strict=True):
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        rows = (x.transpose(0, 1)[None] for x in (q, k, v))
        parts.append(F.scaled_dot_product_attention(*rows, is_causal=True)[0].transpose(0, 1))
    return torch.cat(parts)


class VarlenAttention:
    """The causal attention of sequences laid end to end, by one call of the kernel."""

    def __init__(self, lengths: Sequence[int], device: torch.device | str) -> None:
        starts = torch.zeros(len(lengths) + 1, dtype=torch.int32)
        starts[1:] = torch.tensor(lengths).cumsum(0)
        self.starts_S1 = upload(starts, device)  # where each sequence begins, and the last one ends
        self.longest = max(lengths)

    def attend(self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        """Return the attention of the tokens [T, H, D], in the dtype of the values."""
        from torch.nn.attention.varlen import varlen_attn

        if torch.is_autocast_enabled("cuda"):
            dtype = torch.get_autocast_dtype("cuda")
            q_THD, k_TKD, v_TKD = (x.to(dtype) for x in (q_THD, k_TKD, v_TKD))
        out = varlen_attn(
            q_THD,
            k_TKD,
            v_TKD,
            self.starts_S1,
            self.starts_S1,
            self.longest,
            self.longest,
            window_size=(-1, 0),  # causal
            enable_gqa=q_THD.shape[1] != k_TKD.shape[1],
        )
        assert isinstance(out, Tensor), "it returns more only with return_aux"
        return out


def can_attend(q_THD: Tensor, v_TKD: Tensor) -> bool:
    """True if the kernel takes queries and values of this device, dtype and size."""
    is_half = q_THD.dtype.itemsize == 2 or torch.is_autocast_enabled("cuda")
    head_dim = q_THD.shape[2]
    has_size = head_dim <= MAX_HEAD_DIM and head_dim % HEAD_DIM_MULTIPLE == 0
    return q_THD.is_cuda and is_half and has_size and v_TKD.shape[2] == head_dim
