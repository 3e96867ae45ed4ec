"""Find out why logits aren't finite, and which requests fail.

A request that is itself the cause fails alone. If the model's weights are the cause, and no request
has finite logits, the whole model has failed.
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
    broken: Mapping[GenerationRequest, int], *, all_rows: bool, weights: Weights, version: int
) -> dict[GenerationRequest, Exception]:
    """Return the error of each request whose logits aren't finite.

    Args:
        broken: those requests, each with the index of its first token of such logits.
        all_rows: True if no running request has finite logits.
        weights: (name, tensor) of the model's weights.
        version: version of these weights.

    Raises:
        ModelError: No running request has finite logits, and a weight isn't finite.
    """
    name = find_nonfinite_weight(weights)
    if name is not None and all_rows:
        if version:
            cause = f"an update has broken the weights, '{name}' the first of them"
            fix = "Lower the learning rate, or go back to the last checkpoint."
        else:
            cause, fix = (
                f"the weight '{name}' of the model's files isn't either",
                "Download or export the model again.",
            )
        raise ModelError(
            f"the model's logits aren't finite (weights version {version}): {cause}. {fix}"
        )
    return {request: _failed(request, index, name, version) for request, index in broken.items()}


def find_first_nonfinite(logprobs: NDArray[np.float32]) -> int | None:
    """Return the index of the first logprob that isn't finite; None if all are."""
    finite = np.isfinite(logprobs)
    return None if finite.all() else int(finite.argmin())


def make_request_error(request: GenerationRequest, error: Exception) -> RequestFailed:
    """Return the error of a request whose computation raised `error` while others succeeded."""
    failed = RequestFailed(
        f"a request with a prompt of {len(request.prompt)} tokens can't be computed "
        f"({type(error).__name__}: {error}), and others can. Leave this prompt out."
    )
    failed.__cause__ = error
    return failed


def _failed(
    request: GenerationRequest, index: int, weight: str | None, version: int
) -> RequestFailed:
    where = (
        f"from its new token {index} on (prompt of {len(request.prompt)} tokens, weights "
        f"version {version})"
    )
    if weight is None:
        cause, fix = (
            "the model's weights are finite, but overflow on this request",
            "Leave this prompt out",
        )
    else:
        cause, fix = (
            f"it reads the weight '{weight}', which isn't either",
            "Give the model finite weights",
        )
    return RequestFailed(f"the logits of a request aren't finite {where}: {cause}. {fix}.")
