"""Announce the requests of attempts to the generator as spans."""

from __future__ import annotations

from collections.abc import Awaitable

from ratchet.types import Completion, Sampling
from ratchet.utils.tracer import REQUEST_TRACK, span


async def trace_request(
    generation: Awaitable[Completion], n_prompt_tokens: int, sampling: Sampling
) -> Completion:
    """Await a completion within a span, which gets the `gen_ai.*` attributes of the request.

    Args:
        generation: The call of the generator.
        n_prompt_tokens: Number of tokens of the prompt.
        sampling: The sampling settings of the call.

    Source: OpenTelemetry's semantic conventions for generative AI, opentelemetry-semantic-
    conventions 0.66b2 (`gen_ai_attributes`).
    """
    with span(REQUEST_TRACK, "chat") as request:
        completion = await generation
        if request is not None:
            versions = completion.versions.tolist()
            request.attributes = {
                "gen_ai.request.temperature": sampling.temperature,
                "gen_ai.request.top_p": sampling.top_p,
                "gen_ai.request.max_tokens": sampling.max_new_tokens,
                "gen_ai.usage.input_tokens": n_prompt_tokens,
                "gen_ai.usage.output_tokens": len(completion.tokens),
                "gen_ai.response.finish_reasons": [completion.stop.name.lower()],
                # The weights may change while a completion is sampled.
                "rl.weights.versions": sorted(set(versions)),
            }
    return completion
