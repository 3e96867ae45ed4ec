"""The embedded engine: continuous batching in this process, from the learner's own weights.

On a CPU it has no copy of the weights: after an in-place optimizer step the next token comes from
the new weights, and `commit` only sets their version. On an accelerator that computes products in
bfloat16 (`precision`) it has a copy of the layers' matrices, which `commit` renews. On a CPU, equal
(prompt, sampling, weights) give equal completions, independently of other requests.
"""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path

import torch

from ratchet.errors import ModelError
from ratchet.generators.async_engine import AsyncEngine
from ratchet.generators.config import EngineConfig
from ratchet.generators.engine.batch_invariance import measure_stable_rows
from ratchet.generators.engine.kv_cache import get_default_kv_bytes, get_stage_kv_bytes
from ratchet.generators.engine.limits import GIB, SchedulerLimits
from ratchet.generators.engine.scheduler import Scheduler
from ratchet.generators.engine.stop_strings import TextDecoder
from ratchet.kernels import bfloat16
from ratchet.models.decoder import Decoder
from ratchet.models.lora.files import load_adapter
from ratchet.models.policy import DecoderPolicy, PolicyModel
from ratchet.models.weights.hf_weights import canonical_weights

log = logging.getLogger(__name__)


class EmbeddedEngine(AsyncEngine):
    """A `Generator` in this process; `generate_all` works without an event loop.

    Args:
        model: The built-in decoder, or a policy around it. Any other model raises ModelError.
        tokenizer: Needed only for requests with stop strings.
    """

    core: Scheduler

    def __init__(
        self,
        config: EngineConfig,
        model: Decoder | PolicyModel,
        tokenizer: TextDecoder | None = None,
    ) -> None:
        policy = DecoderPolicy(model) if isinstance(model, Decoder) else model
        decoder = policy.decoder if isinstance(policy, DecoderPolicy) else None
        if not isinstance(decoder, Decoder):
            raise ModelError(
                f"the engine can't run a {type(model).__name__}: set generator.kind to hf, which "
                "runs any model"
            )
        if config.quantise is not None:
            for _, linear in decoder.layer_linears:
                linear.quantise(config.quantise)
        device = decoder.head_weight.device
        casts = casts_matrices(decoder)
        self.precision = config.quantise  # casts are those of the learner's autocast
        auto_rows = config.row_multiple == "auto"
        self._has_auto_cache = config.kv_cache_gib == "auto"
        limits = SchedulerLimits(
            max_running=config.max_running,
            kv_bytes=get_default_kv_bytes(device, _count_later_bytes(decoder, casts=casts))
            if self._has_auto_cache
            else int(float(config.kv_cache_gib) * GIB),
            prefill_tokens=config.prefill_tokens,
            row_multiple=measure_stable_rows(decoder) if auto_rows else int(config.row_multiple),
            dtype=torch.bfloat16 if casts else None,
        )
        positions = decoder.config.max_positions
        super().__init__(
            Scheduler(decoder, limits),
            partial(canonical_weights, decoder),
            decoder.parameters,
            tokenizer,
            vocab_size=decoder.config.vocab_size,
            max_context=min(config.max_context or positions, positions),
            keep_kv=config.keep_kv,
            records_routes=bool(decoder.config.sparse_layers),
            policy=policy,
            adapters=lambda: self.core.runner.adapters.names,
            quantised=lambda: (
                linear.quantised
                for _, linear in decoder.layer_linears
                if linear.quantised is not None
            ),
        )

    @property
    def computed_tokens(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.core.computed_tokens

    def reserve_memory(self, n_bytes: int) -> None:
        """Set the budget of the KV cache to what is free now, less `n_bytes`.

        All models of the stage's learners are on the device by now, references and critics too. The
        cache keeps its memory while they update: `n_bytes` are theirs. The budget stays if
        `kv_cache_gib` sets it, on a CPU, and while requests run.
        """
        runner = self.core.runner
        if not self._has_auto_cache or runner.device.type == "cpu" or self.core.busy:
            return
        runner.clear()
        copy_bytes = 0 if runner.cast is None else runner.cast.count_later_bytes()
        kv_bytes = get_stage_kv_bytes(runner.device, n_bytes + copy_bytes)
        self.core.set_kv_bytes(kv_bytes)
        log.info(
            "generator.kv_cache_gib=auto became %.2f: gradients, moments, copies and a micro-batch "
            "take up to %.2f GiB more",
            kv_bytes / GIB,
            (n_bytes + copy_bytes) / GIB,
        )

    def add_adapter(self, name: str, directory: Path) -> None:
        """Load an adapter from a directory in peft's format, for requests that name it.

        Requests whose `Sampling.adapter` is `name` use it in place of the policy's own adapter,
        over the policy's current base weights. Raises ModelError if the adapter can't be
        read or doesn't fit the model.
        """
        self.core.runner.adapters.add(name, load_adapter(directory))


def casts_matrices(decoder: Decoder) -> bool:
    """True if the engine generates from a copy of the matrices in bfloat16 and not from them."""
    weight = decoder.head_weight
    is_float32 = weight.dtype is torch.float32
    return is_float32 and copies_float32_matrices(bfloat16.is_enabled(), on_cpu=weight.is_cpu)


def copies_float32_matrices(rounds_products: bool, *, on_cpu: bool) -> bool:
    """True if the engine copies a float32 model's matrices to bfloat16, as its KV cache then is.

    Args:
        rounds_products: True if products of layers have operands in bfloat16 (`precision`).
        on_cpu: True if the model is on a CPU, where products round their operands themselves.
    """
    return rounds_products and not on_cpu


def _count_later_bytes(decoder: Decoder, *, casts: bool) -> int:
    """Return the bytes that learner and engine allocate on the device later.

    It is an estimate for an engine without `reserve_memory`: one learner, which keeps a gradient
    and two moments of each weight, in float32.
    """
    trained = sum(p.numel() for p in decoder.parameters() if p.requires_grad)
    copied = sum(p.numel() for p in decoder.parameters()) if casts else 0
    return 12 * trained + 2 * copied
