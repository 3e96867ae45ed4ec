"""Answer the requests of one attempt of an agent, in any order, and build its trajectories.

An answer becomes part of a trajectory only once it is delivered. A request extends a conversation
of the session if its messages begin with that conversation, with unchanged answers. Its prompt then
continues from the exact tokens of that conversation. The first request that extends a conversation
also extends the conversation's trajectory.

Any other request begins a trajectory of its own: a second try from the same point, an edited or
shortened history, or a history that the chat template rewrites. All tokens before its answer are
then its prompt, so that no token is trained on twice.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np

from ratchet.data.chat.renderer import Renderer, Tools
from ratchet.data.chat.task_variables import get_renderer_with
from ratchet.data.chat.thinking import has_malformed_thinking
from ratchet.data.render_thread import run_in_thread
from ratchet.errors import ConfigError, DataError, RatchetError
from ratchet.experience.openai_proxy.answers import TokenScores, cut_at_stop_string
from ratchet.experience.openai_proxy.rendering import count_max_chars, render_prompt
from ratchet.experience.openai_proxy.responses_api.store import MAX_ATTEMPT_BYTES, ResponseStore
from ratchet.experience.openai_proxy.schema import ChatRequest
from ratchet.experience.openai_proxy.strands import (
    AgentAnswer,
    AgentPrompt,
    AgentStrand,
    compute_keys,
    digest,
    extend_key,
    find_token_parent,
    make_trajectories,
)
from ratchet.experience.openai_proxy.structured import choose_structured
from ratchet.experience.openai_proxy.wire import (
    DISTRIBUTION_FIELDS,
    ApiError,
    SamplingFields,
    apply_sampling,
)
from ratchet.experience.seeds import derive_seed
from ratchet.observe.stall_report import GENERATE, waiting
from ratchet.observe.tracing.request_span import trace_request
from ratchet.protocols import Generator
from ratchet.types import (
    Cancelled,
    Completion,
    Failed,
    Message,
    Outcome,
    Owner,
    Sampling,
    StopReason,
    Trajectory,
    Turn,
)

ONLY_SAMPLED = (
    "only the sampled tokens' own logprobs are recorded while a run trains; `ratchet serve` "
    "answers with alternatives and with logprobs of prompts"
)


class AgentSession:
    """The requests and trajectories of an attempt. It belongs to the event loop that creates it.

    Args:
        generator: The policy's generator.
        renderer: The policy's renderer.
        sampling: The sampling parameters of the attempt.
        max_context: Maximum number of prompt and completion tokens.
        max_turns: Number of answers that the attempt may request.

    Attributes:
        ended: Completes when the session can give no more answers, with the attempt's outcome or
            the generator's error.
        responses: The responses that later requests may continue from.
        trains: True if the learner scores the answers.
        exhausted_budget: The reason why a request was refused for lack of turns or context; "" if
            none was.
    """

    trains = True

    def __init__(
        self,
        generator: Generator,
        renderer: Renderer,
        sampling: Sampling,
        *,
        max_context: int,
        max_turns: int,
    ) -> None:
        self.generator = generator
        self._can_mask = generator.records_masks or not self.trains
        self.renderer = renderer
        self.sampling = sampling
        self.max_context = max_context
        self.max_turns = max_turns
        self.ended: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self.responses = ResponseStore(MAX_ATTEMPT_BYTES)
        self.exhausted_budget = ""
        self.reached_turn_limit = False
        self.strands: list[AgentStrand] = []  # the one with the latest answer is last
        self._answers: defaultdict[bytes, list[AgentAnswer]] = defaultdict(list)
        self._request_counts: Counter[bytes] = Counter()
        self._running: set[asyncio.Task[Completion]] = set()
        self._malformed = 0
        self._context = copy_context()
        self._offered_tools = False
        self._rendering = asyncio.Lock()

    async def answer(self, request: ChatRequest) -> AgentAnswer:
        """Sample an answer, which counts only after `record`.

        Cancelling this coroutine aborts the generation.

        Raises:
            ApiError: The request is refused.
        """
        messages = request.conversation
        tools = request.offered_tools
        # Seeds and turns are counted by arrival, so requests are rendered in the order of arrival.
        async with self._rendering:
            self._check(request, request.top_logprobs)
            renderer = self._get_renderer(request)
            keys = compute_keys(messages, tools, request.chat_template_kwargs)
            prompt = await self._make_prompt(renderer, messages, tools, keys)
            sampling, is_run_limit = await self._make_sampling(
                request, len(prompt.tokens), keys[-1]
            )
        completion = await self._sample(prompt, sampling)
        stop = tuple(request.stop or ())
        message, n_malformed = self._parse(renderer, completion, messages, tools, stop)
        return AgentAnswer(
            prompt.tokens,
            completion,
            (*messages, message),
            extend_key(keys[-1], message),
            prompt.parent,
            sampling,
            n_malformed,
            cut=is_run_limit and not completion.stop.finished,
            media=prompt.media,
        )

    async def count_prompt(self, request: ChatRequest) -> int:
        """Return the number of tokens that the policy would read. This does not count as a turn.

        Raises:
            ApiError: The conversation can't be rendered.
        """
        messages = request.conversation
        tools = request.offered_tools
        async with self._rendering:
            exhausted_budget = self.exhausted_budget
            try:
                renderer = self._get_renderer(request)
                keys = compute_keys(messages, tools, request.chat_template_kwargs)
                prompt = await self._make_prompt(renderer, messages, tools, keys)
            finally:
                # Only a conversation that should have been answered exhausts the budget.
                self.exhausted_budget = exhausted_budget
        return len(prompt.tokens)

    async def complete(
        self, tokens: Sequence[int], request: SamplingFields, *, n_top: int = 0
    ) -> AgentAnswer:
        """Sample a completion of token ids, which counts only after `record`.

        It extends the recorded answer whose tokens, prompt included, are the longest prefix of
        `tokens`. The text of the tokens after that prefix becomes a user message of the trajectory.

        Args:
            n_top: Number of likeliest tokens per position that the request wants.

        Raises:
            ApiError: The request is refused.
        """
        prompt = np.asarray(tokens, dtype=np.int64)
        self._check(request, n_top)
        parent = find_token_parent(chain.from_iterable(self._answers.values()), prompt)
        media = () if parent is None else parent.media
        key = digest(b"tokens", prompt.tolist())
        sampling, is_run_limit = await self._make_sampling(request, len(prompt), key)
        known_messages, n_known = (
            ((), 0) if parent is None else (parent.messages, len(parent.tokens))
        )
        if media_token := self.renderer.find_media_token(prompt[n_known:]):
            raise ApiError(
                400,
                f"the prompt has {media_token}, which stands for an image: send images in messages",
                param="prompt",
                code="invalid_value",
            )
        completion = await self._sample(AgentPrompt(prompt, parent, media), sampling)
        prompt_text = self.renderer.tokenizer.decode(prompt[n_known:].tolist(), skip_special=False)
        message = self.renderer.parse(completion.tokens.tolist(), completion.stop)
        return AgentAnswer(
            prompt,
            completion,
            (*known_messages, Message("user", prompt_text), message),
            digest(key, completion.tokens.tolist()),
            parent,
            sampling,
            n_malformed=0,
            cut=is_run_limit and not completion.stop.finished,
            media=media,
        )

    async def score(self, tokens: Sequence[int], **_: Any) -> TokenScores:
        """Raise ApiError: a session knows only the log-probabilities of sampled tokens."""
        raise ApiError(400, ONLY_SAMPLED, param="logprobs", code="unsupported_value")

    def record(self, answer: AgentAnswer) -> None:
        """Add an answer to the attempt once the client has it."""
        parent = answer.parent
        if parent is not None and parent.strand is not None and parent.strand.tip is parent:
            strand = parent.strand
            self.strands.remove(strand)
            strand.record.add(Owner.ENVIRONMENT, answer.prompt[strand.record.length :])
        else:
            strand = AgentStrand()
            strand.record.add(Owner.PROMPT, answer.prompt)
        start = strand.record.length
        strand.record.add(Owner.POLICY, answer.completion.tokens, answer.completion)
        cut = not answer.completion.stop.finished
        strand.turns.append(
            Turn(
                start,
                strand.record.length,
                cut=cut,
                malformed_call=answer.n_malformed > 0,
                malformed_thinking=has_malformed_thinking(answer.message.text, cut=cut),
            )
        )
        strand.tip = answer
        answer.strand = strand
        self.strands.append(strand)
        self._answers[answer.key].append(answer)
        self._malformed += answer.n_malformed

    @property
    def latest_answer(self) -> AgentAnswer | None:
        """The answer that was recorded last."""
        return self.strands[-1].tip if self.strands else None

    def close(self) -> None:
        """Abort running requests, and refuse further ones."""
        self.ended.cancel()
        for task in self._running:
            task.cancel()

    def trajectories(
        self, attempt: int, outcome: Outcome | None, extras: Mapping[str, Any]
    ) -> list[Trajectory]:
        """Return one trajectory for each strand, in the order of their last answers.

        If there is no answer, return one trajectory of a single token.
        """
        metrics = {"turn_limit": float(self.reached_turn_limit), "retries": 0.0}
        if self._offered_tools:
            metrics["malformed_tool_calls"] = float(self._malformed)
        return make_trajectories(
            self.strands,
            metrics,
            attempt=attempt,
            temperature=self.sampling.temperature,
            outcome=outcome,
            extras=extras,
        )

    # --- a request

    def _check(self, request: SamplingFields, n_top: int | None) -> None:
        """Raise ApiError if a sampling parameter differs from the run's, or no turns are left.

        A differing parameter is not ignored, because the agent presumably intends it.
        """
        for name in DISTRIBUTION_FIELDS:
            requested = getattr(request, name)
            current = getattr(self.sampling, name)
            if requested is not None and requested != current:
                raise ApiError(
                    400,
                    f"{name}={requested:g}, but the run samples this attempt with "
                    f"{name}={current:g} (an evaluation may be greedy). Leave {name} out of the "
                    f"request and set it in the recipe, or set agent.ignore=[{name}]",
                    param=name,
                    code="unsupported_value",
                )
        if n_top:
            raise ApiError(400, ONLY_SAMPLED, param="top_logprobs", code="unsupported_value")
        if sum(self._request_counts.values()) >= self.max_turns:
            self.reached_turn_limit = True
            self.exhausted_budget = f"the attempt has had its {self.max_turns} turns"
            raise ApiError(429, self.exhausted_budget, code="turn_limit")

    async def _make_sampling(
        self, request: SamplingFields, n_prompt_tokens: int, key: bytes
    ) -> tuple[Sampling, bool]:
        """Return the sampling of a request, and True if the run sets the limit of new tokens.

        Raises:
            ApiError: The prompt fills the context, or a parameter is invalid.
        """
        room = self.max_context - n_prompt_tokens
        if room <= 0:
            raise self._make_too_long_error(
                f"the conversation has {n_prompt_tokens} tokens, the context {self.max_context}"
            )
        run_limit = min(self.sampling.max_new_tokens, room)
        requested_limit = request.max_new_tokens
        limit = run_limit if requested_limit is None else min(run_limit, requested_limit)
        sampling = apply_sampling(
            self.sampling,
            seed=self._derive_seed(key, request.seed),
            max_new_tokens=limit,
            structured=await choose_structured(
                request, self.sampling, self.renderer, self._can_mask
            ),
            stop=tuple(dict.fromkeys((*self.sampling.stop, *(request.stop or ())))),
            stop_ids=tuple(
                dict.fromkeys((*self.sampling.stop_ids, *(request.stop_token_ids or ())))
            ),
        )
        return sampling, limit == run_limit

    def _check_size(self, messages: Sequence[Message]) -> None:
        """Raise ApiError for a conversation far longer than the context.

        Rendering it would take much time and memory.
        """
        counts_all = self.renderer.extends_history
        characters = sum(
            len(message.text) for message in messages if counts_all or message.role != "assistant"
        )
        limit = count_max_chars(self.renderer, self.max_context)
        if characters > limit:
            raise self._make_too_long_error(
                f"the messages have {characters} characters, but a context of {self.max_context} "
                f"tokens takes at most {limit}"
            )

    def _make_too_long_error(self, reason: str) -> ApiError:
        self.exhausted_budget = reason
        return ApiError(400, reason, param="messages", code="context_length_exceeded")

    def _get_renderer(self, request: ChatRequest) -> Renderer:
        """Return the renderer with the request's variables of the chat template."""
        name = "chat_template_kwargs"
        try:
            return get_renderer_with(self.renderer, request.chat_template_kwargs or {}, name)
        except DataError as error:
            raise ApiError(400, str(error), param=name, code="invalid_value") from error

    async def _make_prompt(
        self,
        renderer: Renderer,
        messages: tuple[Message, ...],
        tools: Tools | None,
        keys: Sequence[bytes],
    ) -> AgentPrompt:
        """Return the prompt of a conversation.

        Raises:
            ApiError: The conversation is too long or can't be rendered.
        """
        parent = self._find_parent(messages, keys)
        render = partial(render_prompt, renderer, messages, tools, parent)
        try:
            self._check_size(messages)
            return await run_in_thread(render)
        except RatchetError as error:
            param = "tools" if isinstance(error, ConfigError) else "messages"
            raise ApiError(400, str(error), param=param, code="invalid_value") from error

    def _find_parent(
        self, messages: Sequence[Message], keys: Sequence[bytes]
    ) -> AgentAnswer | None:
        """Return the delivered answer that these messages continue, or None.

        If several answers have this conversation, an answer that is still the last one of its
        strand is preferred.
        """
        for count in range(len(messages) - 1, 0, -1):
            if messages[count].role == "assistant":
                return None
            if answers := self._answers.get(keys[count]):
                tips = (
                    answer for answer in answers if answer.strand and answer.strand.tip is answer
                )
                return next(tips, answers[0])
        return None

    def _derive_seed(self, key: bytes, requested: int | None) -> int:
        """Return the seed of a request.

        It depends on the attempt, the conversation and how often the attempt has requested this
        conversation, but not on the order of different requests. If a request sets `seed`, its
        repetitions in the attempt get equal answers; other attempts still differ.
        """
        self._request_counts[key] += 1
        return derive_seed(
            self.sampling.seed,
            key.hex(),
            *(("asked", requested) if requested is not None else (self._request_counts[key],)),
        )

    async def _sample(self, prompt: AgentPrompt, sampling: Sampling) -> Completion:
        """Return the completion of a prompt, or raise ApiError if the generator gives none."""
        if self.ended.done():
            raise ApiError(401, "the session has ended", code="session_ended")
        # Generators identify the attempt by context variables, so the request runs in the attempt's
        # context and not in the server's.
        # Generators without a media parameter serve text prompts too.
        media = [prompt.media] if prompt.media else []
        generation = trace_request(
            self.generator.generate(prompt.tokens, sampling, *media), len(prompt.tokens), sampling
        )
        task = asyncio.get_running_loop().create_task(generation, context=self._context)
        self._running.add(task)
        try:
            with waiting("agents", GENERATE, "generator", None):
                await asyncio.wait({task})
        finally:
            self._running.discard(task)
            task.cancel()
        if task.cancelled():
            raise ApiError(401, "the session has ended", code="session_ended")
        error = task.exception()
        # A conversation may be too long for the generator's cache. This fails the request, not the
        # run.
        if isinstance(error, DataError | ConfigError):
            raise ApiError(400, str(error), code="invalid_value")
        # Any other error is not the attempt's fault, so `ended` passes it on and ends the run.
        if error is not None:
            if not self.ended.done():
                self.ended.set_exception(error)
            raise ApiError(500, f"the generator failed: {error}", code="generator_failed")
        completion = task.result()
        if completion.stop is StopReason.ABORTED:
            if not self.ended.done():
                self.ended.set_result(Cancelled("aborted"))
            raise ApiError(503, "the answer was aborted", code="aborted")
        if media_token := self.renderer.find_media_token(completion.tokens):
            reason = f"the policy wrote {media_token}, which stands for media that do not exist"
            if not self.ended.done():
                self.ended.set_result(Failed("data", reason))
            raise ApiError(500, reason, code="media_token")
        return completion

    def _parse(
        self,
        renderer: Renderer,
        completion: Completion,
        messages: Sequence[Message],
        tools: Tools | None,
        stop: tuple[str, ...],
    ) -> tuple[Message, int]:
        """Return the answer's message, and the number of its malformed tool calls."""
        tokens = completion.tokens.tolist()
        message = renderer.parse(tokens, completion.stop)
        n_malformed = 0
        if tools is not None:
            self._offered_tools = True
            n_calls = sum(len(message.tool_calls) for message in messages)
            message, n_malformed = renderer.parse_calls(
                tokens, completion.stop, tools=tools, first=n_calls
            )
        return replace(
            message, content=cut_at_stop_string(message.text, completion, stop)
        ), n_malformed
