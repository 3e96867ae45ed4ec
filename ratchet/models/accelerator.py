"""Choose the accelerator of a process, and how attention is computed on it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ratchet.errors import ConfigError, link_symptom


def require_accelerator(device: torch.device) -> None:
    """Raise ConfigError if the run's device is an accelerator that torch does not find."""
    backends = {"cuda": torch.cuda, "mps": torch.backends.mps, "xpu": torch.xpu}
    if device.type != "cpu" and not backends[device.type].is_available():
        raise ConfigError(
            f"device={device}, but torch finds no {device.type.upper()} accelerator here. Set "
            f"device=cpu. {link_symptom('no-accelerator-is-found')}"
        )


def use_accelerator(device: torch.device | str) -> None:
    """Make a CUDA device the current one of this thread, and choose this process's kernels.

    cuDNN's kernel comes first on recent GPUs, and builds a plan for each new shape: 0.44 s forward
    and 0.55 s backward on a B200 (modelscope/FunASR#3704). Packed batches have new shapes all the
    time, so flash and memory-efficient attention are used instead.

    Products of float32 matrices, which outside autocast are those of the language head, round their
    operands to TF32's 10 bits, finer than the hidden states' bfloat16. In float32 the head of a
    0.6B model would take more than half of an update (an H200's data: 50 TFLOP/s).
    """
    torch.cuda.set_device(device)
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.backends.cuda.matmul.allow_tf32 = True


def attend_grouped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the attention of queries whose heads share keys and values in groups.

    On CUDA only flash attention takes groups, in half precision and without a mask. PyTorch would
    else choose a kernel that keeps the scores of all pairs in float32, so each query head gets keys
    and values of its own.

    Args:
        q: Queries [rows, H, L, D].
        k, v: Keys and values [rows, K, P, D]; K divides H.
        mask: bool, True for pairs that attend; None: attention is causal.
    """
    is_grouped = q.shape[1] != k.shape[1]
    if is_grouped and q.is_cuda:
        is_half = q.dtype.itemsize == 2 or torch.is_autocast_enabled("cuda")
        if mask is not None or not is_half:
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
            is_grouped = False
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=is_grouped
    )
