"""Compute the logits of a few tokens with a model on disk, to verify a conversion.

Megatron-core computes the logits of a Megatron checkpoint. The built-in decoder computes the logits
of every other format. So two implementations check a conversion to or from Megatron.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from ratchet.commands.convert.formats import Config, Weights
from ratchet.commands.convert.megatron_format import MegatronFiles
from ratchet.config.model_shape.decoder_config import DecoderConfig, unsupported_reason
from ratchet.errors import suggest_install
from ratchet.models.convert.dimensions import Dimensions
from ratchet.models.policy import DecoderPolicy, PolicyModel
from ratchet.models.weights.hf_weights import SCORE, empty_decoder, load_weights

N_TOKENS = 16  # length of the sequence whose logits are compared


def explain_missing_logits(
    weights: Weights, config: Config, formats: tuple[str, str]
) -> str | None:
    """Return why logits can't be computed on this machine; None if they can.

    Args:
        weights: The weights of the model.
        config: The content of its config.json.
        formats: The formats of the original and the converted model, keys of `LOGITS_FUNCTIONS`.
    """
    # All weights are loaded in float32.
    needed_bytes = 4 * sum(torch.Size(shape).numel() for shape in weights.shapes.values())
    if reason := unsupported_reason(config):
        return f"the built-in decoder can't run this model: {reason}"
    if SCORE in weights.shapes:
        return "a model with a scalar head has no logits"
    if "megatron" in formats and (
        find_spec("megatron") is None or find_spec("megatron.core") is None
    ):
        return f"megatron-core is not installed: {suggest_install('megatron')}"
    if needed_bytes > psutil.virtual_memory().available:
        return (
            f"the model takes {needed_bytes / 2**30:.1f} GiB in float32, and this machine has less "
            "free memory"
        )
    return None


def compute_test_logits(
    weight_format: str, directory: Path, weights: Weights, config: Config
) -> Tensor:
    """Return the float32 logits (T, V) of T = N_TOKENS fixed random tokens, on the CPU.

    V is the size of the vocabulary. Models with equal V get the same tokens.
    """
    return LOGITS_FUNCTIONS[weight_format](
        DecoderConfig.from_hf(config), directory, weights, config
    )


def _compute_decoder_logits(
    shape: DecoderConfig, directory: Path, weights: Weights, config: Config
) -> Tensor:
    """Return the logits of the built-in decoder."""
    decoder = empty_decoder(shape, dtype=torch.float32, device="cpu")
    load_weights(decoder, ((name, weights.read_whole(name)) for name in weights.shapes))
    return _compute_logits(DecoderPolicy(decoder))


def _compute_megatron_logits(
    shape: DecoderConfig, directory: Path, weights: Weights, config: Config
) -> Tensor:
    """Return the logits of Megatron-core, which reads its checkpoint from `directory`."""
    from ratchet.models.megatron.build import destroy_process_groups, init_process_groups
    from ratchet.models.megatron.policy import MegatronPolicy
    from ratchet.models.parallel.megatron_sizes import MegatronSizes

    files = MegatronFiles(directory, Dimensions.from_hf(config))
    with _single_process_group():
        init_process_groups(MegatronSizes())
        try:
            policy = MegatronPolicy(shape, MegatronSizes())
            with torch.no_grad():
                for name, parameter in policy.chunks[0].named_parameters():
                    parameter.copy_(files.parameter(name))
            return _compute_logits(policy)
        finally:
            destroy_process_groups()


# The function that computes logits, by the format of the model.
LOGITS_FUNCTIONS: Mapping[str, Callable[[DecoderConfig, Path, Weights, Config], Tensor]] = {
    "hf": _compute_decoder_logits,
    "dcp": _compute_decoder_logits,
    "learner": _compute_decoder_logits,
    "megatron": _compute_megatron_logits,
}


def _compute_logits(policy: PolicyModel) -> Tensor:
    """Return the logits of N_TOKENS random tokens, which are drawn with a fixed seed on the CPU.

    Suffixes name dimensions: T tokens, d the width of the hidden states.
    """
    device = next(policy.parameters()).device
    tokens_T = torch.randint(
        policy.vocab_size, (N_TOKENS,), generator=torch.Generator().manual_seed(0)
    ).to(device)
    with torch.no_grad():
        hidden_Td = policy.hidden(tokens_T, torch.arange(N_TOKENS, device=device), [N_TOKENS])
        return policy.logits(hidden_Td).cpu()


@contextmanager
def _single_process_group() -> Iterator[None]:
    """Provide the process group that Megatron requires. This process is its only rank."""
    dist.init_process_group(
        "gloo" if not torch.cuda.is_available() else None,
        rank=0,
        world_size=1,
        store=dist.HashStore(),
    )
    try:
        yield
    finally:
        dist.destroy_process_group()
