"""Make vLLM's sampler report the logprobs before its filters, and apply top-p as Ratchet does.

N = rows of a step, V = vocabulary.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor


def report_unfiltered(sampler: Any) -> None:
    """Make a sampler report two logprobs of a token to requests with `logprobs=1`.

    The first entry is the drawn token's logprob under the temperature, before filters. The second
    is its logprob after filters; it is stored under the id of another token. Requests without
    filters use `logprobs=0` and get only the first, which vLLM reports by itself.

    sampler: a `vllm.v1.sample.sampler.Sampler` with `logprobs_mode="processed_logprobs"`.
    """
    sampler.sample = partial(_sample, sampler, sampler.sample)
    sampler.gather_logprobs = partial(_gather_logprobs, sampler.gather_logprobs)


def _sample(
    sampler: Any, sample: Any, logits_NV: Tensor, metadata: Any, mode: str | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return the drawn tokens [N], and their logprobs: before and after filters, [N, 2, V].

    vLLM applies min-p, top-k and top-p in this order, each to the renormalised probabilities of the
    tokens that the previous filter kept. Ratchet's filters all read the probabilities under the
    temperature (`ratchet.sampling.Sampling`). Renormalising changes only the result of top-p,
    because min-p compares ratios and top-k compares ranks. So top-p is applied first here.
    """
    if metadata.all_greedy or not metadata.max_num_logprobs or metadata.max_num_logprobs < 0:
        return sample(logits_NV, metadata, mode)
    scaled_NV = sampler.apply_temperature(
        logits_NV.clone(), metadata.temperature, metadata.all_random
    )
    unfiltered_NV = sampler.compute_logprobs(scaled_NV)
    if metadata.top_p is not None:
        apply_filters = import_module("vllm.v1.sample.ops.topk_topp_sampler").apply_top_k_top_p
        kept_NV = apply_filters(scaled_NV, None, metadata.top_p)
        logits_NV = logits_NV.masked_fill(kept_NV == -torch.inf, -torch.inf)
        metadata = replace(metadata, top_p=None)
    tokens_N, filtered_NV = sample(logits_NV, metadata, mode)
    if filtered_NV is None:
        return tokens_N, None
    return tokens_N, torch.stack([unfiltered_NV, filtered_NV], dim=1)


def _gather_logprobs(gather: Any, logprobs: Tensor, num_logprobs: int, token_ids: Tensor) -> Any:
    """Return vLLM's `LogprobsTensors` of drawn tokens, int64 [N], from what `_sample` returned."""
    if logprobs.dim() == 2:
        return gather(logprobs, num_logprobs, token_ids=token_ids)
    vocab_size = logprobs.shape[-1]
    drawn_N = token_ids[:, None]
    pairs_N2 = logprobs.gather(2, drawn_N[:, None].expand(-1, 2, -1))[:, :, 0]
    ids_N2 = torch.cat([drawn_N, (drawn_N + 1) % vocab_size], dim=1).to(torch.int32)
    ranks_N = (logprobs[:, 0] > pairs_N2[:, :1]).sum(-1)
    outputs = import_module("vllm.v1.outputs")
    return outputs.LogprobsTensors(ids_N2, pairs_N2, ranks_N)
