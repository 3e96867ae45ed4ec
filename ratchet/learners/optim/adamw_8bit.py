"""AdamW whose running means rest in 8 bits: a quarter of what they take, by the codes and kernels
of bitsandbytes.

B = blocks of a flattened tensor, n = its numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from ratchet.learners.optim.adamw import AdamW, Moments
from ratchet.models.layers.lazy_bitsandbytes import bits

BLOCK = 256  # numbers that share a scale, as in the paper
SMALL = 4096  # parameters of fewer numbers keep float32: they weigh nothing
AT_ONCE = 2**22  # numbers that are restored at a time: whole blocks


class AdamW8bit(AdamW):
    """8-bit optimizer states, arXiv:2110.02861: of each block of numbers one scale, and of each
    number the nearest of 256 values, dense around zero. A step itself is AdamW's, in float32.

    Two things differ from the paper. A block's scale is its number of largest magnitude with its
    sign, which so is a code exactly: quantising what was restored changes no bit, and checkpoints
    of ranks may hold plain numbers, for any division. And it is the root of the running square that
    is quantised, which has the range of the mean: a square of 1e-4 of its block's largest gradient
    would be rounded to zero, and the step be the mean over eps.
    """

    @cached_property
    def codes(self) -> Codes:
        return Codes()

    def _adamw(self, some: Sequence[tuple[str, nn.Parameter]], lr: float, decay: float) -> None:
        plain = [(name, p) for name, p in some if self.local(p).numel() < SMALL]
        if plain:
            super()._adamw(plain, lr, decay)
        for name, p in some:
            if self.local(p).numel() >= SMALL:
                assert p.grad is not None
                self._by_runs(
                    self.state.get(name) or self.begin(name, p),
                    self.local(p),
                    self.local(p.grad),
                    lr,
                    decay,
                )

    def _by_runs(
        self, moments: Moments, own: Tensor, gradient: Tensor, lr: float, decay: float
    ) -> None:
        """A run of blocks after the other: all of a large matrix in float32 would be what this
        class saves."""
        own_n, gradient_n, begun = own.view(-1), gradient.reshape(-1), moments["step"].clone()
        for start in range(0, own.numel(), AT_ONCE):
            run = slice(start, start + AT_ONCE)
            blocks = slice(start // BLOCK, (start + AT_ONCE) // BLOCK)
            quantised = {
                key: value[blocks if key.endswith("scales") else run]
                for key, value in _flat(moments).items()
            }
            moments["step"].copy_(begun)
            numbers = {"step": moments["step"], **self._restore(quantised)}
            self.take([own_n[run]], [gradient_n[run]], [numbers], lr, decay)
            self._quantise(numbers, quantised)

    def moments(self, name: str, own: Tensor) -> Moments:
        if own.numel() < SMALL:
            return super().moments(name, own)
        made: Moments = {"step": torch.zeros((), device=own.device)}
        for key in ("mean", "root"):
            made[f"{key}_codes"] = torch.full_like(own, self.codes.zero(key), dtype=torch.uint8)
            made[f"{key}_scales"] = torch.zeros(-(-own.numel() // BLOCK), device=own.device)
        return made

    def plain(self, name: str) -> Moments:
        moments = self.state[name]
        if "mean_codes" not in moments:
            return super().plain(name)
        shape = moments["mean_codes"].shape
        found = {key: value.view(shape) for key, value in self._restore(_flat(moments)).items()}
        return found | {key: moments[key] for key in ("average",) if key in moments}

    def keep(self, name: str, plain: Mapping[str, Tensor]) -> None:
        if "mean_codes" in self.state[name]:
            self._quantise(
                {key: value.reshape(-1) for key, value in plain.items()}, _flat(self.state[name])
            )

    def _restore(self, quantised: Mapping[str, Tensor]) -> Moments:
        """[n] each."""
        found = {
            key: self.codes.restore(quantised[f"{key}_codes"], quantised[f"{key}_scales"], key)
            for key in ("mean", "root")
        }
        return {"exp_avg": found["mean"], "exp_avg_sq": found["root"].square_()}

    def _quantise(self, plain: Mapping[str, Tensor], quantised: Mapping[str, Tensor]) -> None:
        for key, numbers_n in (("mean", plain["exp_avg"]), ("root", plain["exp_avg_sq"].sqrt())):
            codes_n, scales_B = self.codes.quantise(numbers_n, key)
            quantised[f"{key}_codes"].copy_(codes_n)
            quantised[f"{key}_scales"].copy_(scales_B)


class Codes:
    """The 256 values of the mean, which has signs, and of the root, which has none; between -1 and
    1. The nearest is found here: the library's kernel for CPUs takes a neighbour of it where values
    are small, even of a number that is a value."""

    def __init__(self) -> None:
        self.values = {
            key: bits().create_dynamic_map(signed=key == "mean") for key in ("mean", "root")
        }

    def zero(self, key: str) -> int:
        return int((self.values[key] == 0).nonzero()[0])

    def quantise(self, numbers_n: Tensor, key: str) -> tuple[Tensor, Tensor]:
        """uint8 [n], float32 [B]."""
        n, values = numbers_n.numel(), self._on(numbers_n, key)
        numbers_Bk = pad(numbers_n, (0, -n % BLOCK)).view(-1, BLOCK)  # k = BLOCK
        largest_B1 = numbers_Bk.gather(1, numbers_Bk.abs().argmax(1, keepdim=True))
        relative_Bk = numbers_Bk / torch.where(largest_B1 == 0, 1.0, largest_B1)
        codes_Bk = torch.bucketize(relative_Bk, (values[1:] + values[:-1]) / 2, out_int32=True)
        return codes_Bk.to(torch.uint8).view(-1)[:n], largest_B1[:, 0]

    def restore(self, codes_n: Tensor, scales_B: Tensor, key: str) -> Tensor:
        """float32 [n]."""
        code = self._on(codes_n, key)
        return bits().dequantize_blockwise(
            codes_n.contiguous(), absmax=scales_B, code=code, blocksize=BLOCK
        )

    def _on(self, like: Tensor, key: str) -> Tensor:
        self.values[key] = self.values[key].to(like.device)
        return self.values[key]


def _flat(moments: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Views of what is quantised."""
    return {
        key: value.view(-1) for key, value in moments.items() if key.endswith(("_codes", "_scales"))
    }
