"""AdamW with 8-bit moments, which take a quarter of the memory. bitsandbytes quantises them.

B = blocks of a flattened tensor, n = its elements.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from ratchet.learners.optim.adamw import AdamW, Moments
from ratchet.models.layers.lazy_bitsandbytes import load_bitsandbytes

# Elements that share a scale, as in bitsandbytes' own 8-bit optimizers.
BLOCK_SIZE = 256
# Parameters with fewer elements keep float32 moments, which take little memory.
MIN_QUANTISED_SIZE = 4096
# Elements of a parameter that are updated at a time; a multiple of BLOCK_SIZE.
CHUNK_SIZE = 2**22


class AdamW8bit(AdamW):
    """AdamW with 8-bit optimizer states (arXiv:2110.02861).

    Each block of elements has one scale, and each element is stored as the nearest of 256 values,
    which are dense around zero. The step itself is AdamW's, in float32.

    Two things differ from the paper:
    - The scale of a block is its element of largest magnitude, with its sign, so that a code
      represents this element exactly. Quantising restored moments again then changes no bit. So
      checkpoints hold restored moments, which any number of ranks can load.
    - The square root of the second moment is quantised, because it has the same range as the first
      moment. Otherwise the second moment of small gradients (1e-4 of the block's largest) would be
      rounded to zero, and their step would be the first moment divided by eps.
    """

    @cached_property
    def codes(self) -> MomentCodes:
        """The 8-bit codes of the moments, created at first use."""
        return MomentCodes()

    def _update_group(
        self, group: Sequence[tuple[str, nn.Parameter]], lr: float, decay: float
    ) -> None:
        small_parameters = [
            (name, p) for name, p in group if self.to_local(p).numel() < MIN_QUANTISED_SIZE
        ]
        if small_parameters:
            super()._update_group(small_parameters, lr, decay)
        for name, p in group:
            if self.to_local(p).numel() >= MIN_QUANTISED_SIZE:
                assert p.grad is not None
                self._update_in_chunks(
                    self.state.get(name) or self.init_state(name, p),
                    self.to_local(p),
                    self.to_local(p.grad),
                    lr,
                    decay,
                )

    def _update_in_chunks(
        self, moments: Moments, local: Tensor, gradient: Tensor, lr: float, decay: float
    ) -> None:
        """Update a parameter in chunks of blocks, one after another.

        Restoring all moments of a large matrix at once would take the memory that this class saves.
        """
        local_n = local.view(-1)
        gradient_n = gradient.reshape(-1)
        step_before = moments["step"].clone()
        for start in range(0, local.numel(), CHUNK_SIZE):
            chunk = slice(start, start + CHUNK_SIZE)
            blocks = slice(start // BLOCK_SIZE, (start + CHUNK_SIZE) // BLOCK_SIZE)
            quantised = {
                key: value[blocks if key.endswith("scales") else chunk]
                for key, value in _flatten(moments).items()
            }
            # All chunks belong to one step: undo the count of the previous chunk.
            moments["step"].copy_(step_before)
            restored = {"step": moments["step"], **self._restore(quantised)}
            self._adamw_step([local_n[chunk]], [gradient_n[chunk]], [restored], lr, decay)
            self._quantise(restored, quantised)

    def init_moments(self, name: str, local: Tensor) -> Moments:
        if local.numel() < MIN_QUANTISED_SIZE:
            return super().init_moments(name, local)
        moments: Moments = {"step": torch.zeros((), device=local.device)}
        for key in ("mean", "root"):
            moments[f"{key}_codes"] = torch.full_like(
                local, self.codes.get_zero_code(key), dtype=torch.uint8
            )
            moments[f"{key}_scales"] = torch.zeros(
                -(-local.numel() // BLOCK_SIZE), device=local.device
            )
        return moments

    def get_moments(self, name: str) -> Moments:
        moments = self.state[name]
        if "mean_codes" not in moments:
            return super().get_moments(name)
        shape = moments["mean_codes"].shape
        restored = {
            key: value.view(shape) for key, value in self._restore(_flatten(moments)).items()
        }
        return restored | {key: moments[key] for key in ("average",) if key in moments}

    def store(self, name: str, moments: Mapping[str, Tensor]) -> None:
        """Quantise and store moments that the caller has overwritten."""
        if "mean_codes" in self.state[name]:
            self._quantise(
                {key: value.reshape(-1) for key, value in moments.items()},
                _flatten(self.state[name]),
            )

    def _restore(self, quantised: Mapping[str, Tensor]) -> Moments:
        """Return the restored moments, float32 [n] each."""
        restored = {
            key: self.codes.restore(quantised[f"{key}_codes"], quantised[f"{key}_scales"], key)
            for key in ("mean", "root")
        }
        return {"exp_avg": restored["mean"], "exp_avg_sq": restored["root"].square_()}

    def _quantise(self, moments: Mapping[str, Tensor], quantised: Mapping[str, Tensor]) -> None:
        """Quantise moments into the codes and scales, in place."""
        for key, numbers_n in (
            ("mean", moments["exp_avg"]),
            ("root", moments["exp_avg_sq"].sqrt()),
        ):
            codes_n, scales_B = self.codes.quantise(numbers_n, key)
            quantised[f"{key}_codes"].copy_(codes_n)
            quantised[f"{key}_scales"].copy_(scales_B)


class MomentCodes:
    """The two sets of 256 values between -1 and 1 that 8-bit codes stand for.

    The set "mean" (for the first moment) has negative values too. The set "root" (for the square
    root of the second moment) has none. `quantise` searches the nearest value itself, because
    bitsandbytes' CPU kernel may return a neighbour of the nearest value for small numbers.
    """

    def __init__(self) -> None:
        self.values = {
            key: load_bitsandbytes().create_dynamic_map(signed=key == "mean")
            for key in ("mean", "root")
        }

    def get_zero_code(self, key: str) -> int:
        """Return the code of the value 0."""
        return int((self.values[key] == 0).nonzero()[0])

    def quantise(self, numbers_n: Tensor, key: str) -> tuple[Tensor, Tensor]:
        """Return (codes uint8 [n], scales float32 [B]) of the numbers."""
        n = numbers_n.numel()
        values = self._get_values(numbers_n.device, key)
        numbers_Bk = pad(numbers_n, (0, -n % BLOCK_SIZE)).view(-1, BLOCK_SIZE)  # k = BLOCK_SIZE
        largest_B1 = numbers_Bk.gather(1, numbers_Bk.abs().argmax(1, keepdim=True))
        relative_Bk = numbers_Bk / torch.where(largest_B1 == 0, 1.0, largest_B1)
        codes_Bk = torch.bucketize(relative_Bk, (values[1:] + values[:-1]) / 2, out_int32=True)
        return codes_Bk.to(torch.uint8).view(-1)[:n], largest_B1[:, 0]

    def restore(self, codes_n: Tensor, scales_B: Tensor, key: str) -> Tensor:
        """Return the numbers that codes and scales represent, float32 [n]."""
        values = self._get_values(codes_n.device, key)
        return load_bitsandbytes().dequantize_blockwise(
            codes_n.contiguous(), absmax=scales_B, code=values, blocksize=BLOCK_SIZE
        )

    def _get_values(self, device: torch.device, key: str) -> Tensor:
        """Return the values on a device, to which they are moved."""
        self.values[key] = self.values[key].to(device)
        return self.values[key]


def _flatten(moments: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return flat views of the quantised moments."""
    return {
        key: value.view(-1) for key, value in moments.items() if key.endswith(("_codes", "_scales"))
    }
