"""Explain logits that aren't finite, and decide which requests fail.

Only the requests with such logits fail. If a weight isn't finite and no request has finite logits,
the error is the model's, and all requests fail.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ratchet.errors import ModelError, RequestFailed
from ratchet.generators.request import GenerationRequest

Weights = Iterable[tuple[str, Tensor]]


def find_nonfinite_weight(weights: Weights) -> str | None:
    """Return the name of the first weight that holds a NaN or an infinity; None if all are finite.

    This reads every weight once, as a decoding step does.
    """
    for name, weight in weights:
        if weight.is_floating_point() and not bool(weight.isfinite().all()):
            return name
    return None


def explain_nonfinite(
    broken: Mapping[GenerationRequest, int], *, all_fail: bool, weights: Weights, version: int
) -> dict[GenerationRequest, Exception]:
    """Return the error of each request whose logits aren't finite.

    Args:
        broken: by request, the index of its first token whose logits aren't finite.
        all_fail: True if no running request has finite logits.
        weights: (name, tensor) of the model's weights.
        version: version of these weights.

    Raises:
        ModelError: No running request has finite logits, and a weight isn't finite.
    """
    weight_name = find_nonfinite_weight(weights)
    if weight_name is not None and all_fail:
        if version:
            cause = f"an update has broken the weights (the first one is '{weight_name}')"
            fix = "Lower the learning rate, or go back to the last checkpoint."
        else:
            cause = f"the weight '{weight_name}' in the model's files isn't finite"
            fix = "Download or export the model again."
        raise ModelError(
            f"the model's logits aren't finite (weights version {version}): {cause}. {fix}"
        )
    return {
        request: _make_nonfinite_error(request, index, weight_name, version)
        for request, index in broken.items()
    }


def find_first_nonfinite(logprobs: NDArray[np.float32]) -> int | None:
    """Return the index of the first logprob that isn't finite; None if all are."""
    is_finite = np.isfinite(logprobs)
    return None if is_finite.all() else int(is_finite.argmin())


def make_request_error(request: GenerationRequest, error: Exception) -> RequestFailed:
    """Return the error of a request whose computation raised `error` while others succeeded."""
    request_error = RequestFailed(
        f"a request with a prompt of {len(request.prompt)} tokens can't be computed "
        f"({type(error).__name__}: {error}), while other requests can. Leave this prompt out."
    )
    request_error.__cause__ = error
    return request_error


def _make_nonfinite_error(
    request: GenerationRequest, index: int, weight: str | None, version: int
) -> RequestFailed:
    position = (
        f"from its new token {index} on (prompt of {len(request.prompt)} tokens, weights "
        f"version {version})"
    )
    if weight is None:
        cause = "the model's weights are finite, but overflow on this request"
        fix = "Leave this prompt out"
    else:
        cause = f"the request reads the weight '{weight}', which isn't finite either"
        fix = "Load a model with finite weights"
    return RequestFailed(f"the logits of a request aren't finite {position}: {cause}. {fix}.")
