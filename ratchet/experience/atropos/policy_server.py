"""Answer the requests of an Atropos environment with the policy, and record the answers.

Source: the package atroposlib 0.4.0, envs/server_handling (server_baseline.py, managed_server.py).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from ratchet.experience.openai_proxy import token_api
from ratchet.experience.openai_proxy.answers import ChatFormat, TokenNames, get_finish_reason
from ratchet.experience.openai_proxy.replies import make_reply
from ratchet.experience.openai_proxy.schema import ChatRequest
from ratchet.experience.openai_proxy.session import AgentSession
from ratchet.experience.openai_proxy.strands import AgentAnswer
from ratchet.experience.openai_proxy.wire import ApiError

if TYPE_CHECKING:
    from openai.types import Completion
    from openai.types.chat import ChatCompletion

# Fields that concern Atropos's choice of a server, or the HTTP request. They change no token.
ROUTING_FIELDS = frozenset({"split", "skip_reasoning", "timeout", "model", "extra_body"})


class _Slots(asyncio.Semaphore):
    """A semaphore with the further members of Atropos's. The generator limits the requests."""

    max_val = 2**20

    def __init__(self) -> None:
        super().__init__(self.max_val)

    def min_val(self) -> int:
        return 0


class PolicyServer:
    """The only server of an Atropos `ServerManager` while a group is played.

    Unlike Atropos's own servers, it does not repeat a refused request.

    Args:
        session: Records the answers.
        ignored: Fields of requests that have no effect.

    Attributes:
        tokenizer: The environment's tokenizer, which `managed_server` uses.
        refusals: The reasons of refused requests, because environments may catch the exceptions.
    """

    server_healthy = True

    def __init__(self, session: AgentSession, ignored: Sequence[str], tokenizer: Any) -> None:
        self.session, self.tokenizer = session, tokenizer
        self.config = SimpleNamespace(model_name="policy", base_url=None)
        self.sem, self.eval_sem = _Slots(), _Slots()
        self.refusals: list[str] = []
        self._left_out = ROUTING_FIELDS.union(ignored)

    async def chat_completion(self, *, n: int | None = None, **fields: Any) -> ChatCompletion:
        """Return `n` answers to a conversation."""
        from openai.types.chat import ChatCompletion

        with self._note_refusal():
            request = ChatRequest.read(self._write_body(fields))
            replies = await _repeat(lambda: make_reply(self.session, request), n)
        form = ChatFormat(request, "chatcmpl-policy")
        bodies = [form.write_body(reply) for _, reply in replies]
        for answer, _ in replies:
            self.session.record(answer)
        choices = [{**body["choices"][0], "index": i} for i, body in enumerate(bodies)]
        return ChatCompletion.model_validate({**bodies[0], "choices": choices})

    async def completion(self, *, n: int | None = None, **fields: Any) -> Completion:
        """Return `n` continuations of a text."""
        from openai.types import Completion

        with self._note_refusal():
            request = token_api.CompletionRequest.read(self._write_body(fields))
            (prompt,) = request.list_prompts(self.session.renderer)
            answers = await _repeat(lambda: self.session.complete(prompt, request), n)
        results = [token_api.TokenCompletion(prompt, self._record(answer)) for answer in answers]
        names = TokenNames(self.session.renderer.tokenizer, as_ids=False)
        body = token_api.write_completions("cmpl-policy", request, results, names)
        return Completion.model_validate(body)

    async def tokens_and_logprobs_completion(
        self,
        *,
        prompt: str = "",
        input_ids: Sequence[int] | None = None,
        n: int | None = None,
        **fields: Any,
    ) -> tuple[list[int], list[list[int]], list[list[float]], list[str]]:
        """Return the prompt's tokens, and of each answer the tokens, logprobs and finish reason."""
        with self._note_refusal():
            request = token_api.GenerateSampling.read(self._write_body(fields))
            renderer = self.session.renderer
            ids = (
                token_api.encode_text(renderer, prompt, add_special=True)
                if input_ids is None
                else list(input_ids)
            )
            answers = await _repeat(lambda: self.session.complete(ids, request), n)
        completions = [self._record(answer).completion for answer in answers]
        return (
            ids,
            [completion.tokens.tolist() for completion in completions],
            [completion.logprobs.tolist() for completion in completions],
            [get_finish_reason(completion) for completion in completions],
        )

    def _record(self, answer: AgentAnswer) -> AgentAnswer:
        self.session.record(answer)
        return answer

    def _write_body(self, fields: dict[str, Any]) -> bytes:
        """Return the JSON body of a request for one answer."""
        fields = {**fields, **(fields.get("extra_body") or {})}
        body = {name: value for name, value in fields.items() if name not in self._left_out}
        # A message that the environment got from the policy is a model of pydantic.
        return json.dumps(body, default=lambda model: model.model_dump(exclude_none=True)).encode()

    @contextmanager
    def _note_refusal(self) -> Iterator[None]:
        try:
            yield
        except ApiError as error:
            # The session names the key of agents. This environment has one of its own.
            self.refusals.append(str(error).replace("agent.ignore", "environment.ignore"))
            raise


async def _repeat(sample: Callable[[], Coroutine[Any, Any, Any]], n: int | None) -> list[Any]:
    """Return `n` results, one by default, sampled concurrently."""
    return await asyncio.gather(*(sample() for _ in range(n or 1)))
