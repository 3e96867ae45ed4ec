"""The protocol of request handlers: an attempt's session, or a served model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ratchet.allowed_tokens import AllowedTokens
from ratchet.data.chat.renderer import Renderer
from ratchet.experience.openai_proxy.answers import TokenScores
from ratchet.experience.openai_proxy.responses_api.store import ResponseStore
from ratchet.experience.openai_proxy.schema import ChatRequest
from ratchet.experience.openai_proxy.strands import AgentAnswer
from ratchet.experience.openai_proxy.wire import SamplingFields


class RequestHandler(Protocol):
    """The handler of the requests with one key.

    Attributes:
        max_context: Maximum number of prompt and completion tokens.
        responses: The responses that later requests may continue from.
    """

    @property
    def renderer(self) -> Renderer: ...
    @property
    def max_context(self) -> int: ...
    @property
    def responses(self) -> ResponseStore: ...
    async def answer(self, request: ChatRequest) -> AgentAnswer: ...
    async def count_prompt(self, request: ChatRequest) -> int: ...
    async def complete(
        self, tokens: Sequence[int], request: SamplingFields, *, n_top: int = 0
    ) -> AgentAnswer: ...
    async def score(
        self,
        tokens: Sequence[int],
        *,
        temperature: float,
        n_top: int,
        allowed: AllowedTokens | None = None,
    ) -> TokenScores: ...
    def record(self, answer: AgentAnswer) -> None: ...
