"""Play one attempt (a multi-turn rollout): generate, step the environment, observe, repeat.

An attempt ends when the environment ends it, or when a budget of turns or tokens is used up. The
prompt of a turn normally extends the tokens of the turns before it. If the chat template rewrites
the history (for example, drops the reasoning of earlier turns), the history forks: a new strand
begins, whose prompt is the conversation as it is rendered now. With a window of history, every turn
begins a strand, whose prompt is what `Environment.observe` returns. An attempt has one trajectory
for each strand.

L = tokens of the trajectory so far.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import numpy as np

from ratchet.data.chat.inline_text import merge_inline
from ratchet.data.chat.renderer import Renderer
from ratchet.data.chat.task_variables import get_task_renderer
from ratchet.data.chat.thinking import has_malformed_thinking
from ratchet.data.render_thread import run_beside_loop
from ratchet.errors import DataError
from ratchet.experience.rollout.environment_answers import (
    get_offered_tools,
    reset_environment,
    reward_cut_attempt,
    step_environment,
)
from ratchet.experience.rollout.episode_state import (
    EpisodeState,
    EpisodeStrand,
    PromptCache,
    render_prompt,
)
from ratchet.experience.rollout.history import observe
from ratchet.experience.seeds import derive_seed
from ratchet.observe.stall_report import GENERATE, Wait, waiting
from ratchet.observe.tracing.request_span import trace_request
from ratchet.protocols import Environment, Generator
from ratchet.rewards.deadline import limit_time
from ratchet.types import (
    Cancelled,
    Completion,
    Failed,
    Message,
    Outcome,
    Owner,
    PlacedMedium,
    Sampling,
    StopReason,
    Task,
    Trajectory,
    Truncated,
    Turn,
)
from ratchet.utils.user_code import UserCodeFailed, leave_when_cancelled

T = TypeVar("T")


@dataclass(frozen=True)
class EpisodePlayer:
    """A player of attempts. All attempts share one player."""

    generator: Generator
    renderer: Renderer
    max_context: int
    """Maximum number of tokens in the model's context; the last turn is cut to it."""
    max_turns: int = 64
    """Number of turns after which an attempt is truncated."""
    history_window: int | None = None
    """Number of past turns in a turn's prompt; None: all turns, in one strand."""
    timeout_s: float | None = None
    """Seconds for a whole attempt, including waits for the generator; None: no limit. Only code
    that awaits can be interrupted, not code that blocks the event loop."""

    async def play(
        self,
        task: Task,
        environment: Environment,
        sampling: Sampling,
        *,
        attempt: int,
        prompt_cache: PromptCache | None = None,
    ) -> list[Trajectory]:
        """Play an attempt and return its trajectories, without rewards.

        There is one trajectory, or more if the history forked. All trajectories have the same
        `outcome`: None, or already Truncated, Failed or Cancelled. Generator errors other than
        DataError are raised, because they are not the attempt's fault.

        All trajectories have the metrics of the whole attempt: "turns", "forks", "retries" (0
        here), "turn_limit" (1 if the attempt ran out of turns), "malformed_tool_calls" if tools are
        offered, and the sums of the environment's step metrics.

        Args:
            prompt_cache: The prompt cache that the attempts of a group share.
        """
        state = EpisodeState(task, environment, sampling, list(task.messages))
        outcome: Outcome | None
        limit = limit_time(self.timeout_s)
        try:
            player = replace(self, renderer=get_task_renderer(self.renderer, task))
            async with limit:
                turns = player._play_turns(state, prompt_cache or PromptCache())
                outcome = await (turns if self.timeout_s is None else leave_when_cancelled(turns))
                if isinstance(outcome, Truncated):
                    await player._reward_cut_attempt(state)
        except TimeoutError:
            # If the limit has not expired, the generator raised this error.
            if not limit.expired():
                raise
            n_turns = int(state.metrics["turns"])
            outcome = Failed(
                "timeout",
                f"not over after {self.timeout_s:g} s and {n_turns} turns, waiting for "
                f"{state.waits_for}",
            )
        except UserCodeFailed as failure:
            outcome = Failed("environment", f"{task.label}:\n{failure}")
        # The messages can't be rendered, or the generator can't read the prompt.
        except DataError as error:
            outcome = Failed("data", f"{task.label}, {state.last_rendered}:\n{error}")
        return state.trajectories(attempt, outcome)

    async def _play_turns(self, state: EpisodeState, prompt_cache: PromptCache) -> Outcome | None:
        """Play turns until the attempt ends. Return its outcome; None if it ended normally."""
        environment = state.environment
        with self._waiting("reset", environment):
            state.messages = await reset_environment(environment, state.task)
        if environment.has_tools:
            # A mixture of environments may offer no tools for this task.
            state.tools = await get_offered_tools(environment, state.task) or None
            state.metrics["malformed_tool_calls"] = 0
        strand = state.strand
        state.turn_starts.append(len(state.messages))
        state.waits_for = "the tokenizer"
        prompt, strand.media = await prompt_cache.render(self.renderer, state.messages, state.tools)
        strand.record.add(Owner.PROMPT, prompt)
        for turn_index in range(self.max_turns):
            room = self.max_context - state.strand.record.length
            if room <= 0:
                if turn_index:
                    return Truncated()
                length = state.strand.record.length
                detail = (
                    f"the prompt has {length} tokens, the context {self.max_context}: "
                    "shorten the prompt or drop the task"
                )
                return Failed("prompt_too_long", detail)
            ended, outcome = await self._play_turn(state, turn_index, room)
            if ended:
                return outcome
        state.metrics["turn_limit"] = 1
        return Truncated()

    async def _play_turn(
        self, state: EpisodeState, turn_index: int, room: int
    ) -> tuple[bool, Outcome | None]:
        """Play a turn, and return (True if the attempt ended with it, the outcome if known)."""
        sampling = state.sampling
        strand = state.strand
        environment = state.environment
        if environment.stop_strings:
            sampling = replace(
                sampling, stop=tuple(dict.fromkeys((*sampling.stop, *environment.stop_strings)))
            )
        if turn_index or room < sampling.max_new_tokens:
            seed = derive_seed(sampling.seed, turn_index) if turn_index else sampling.seed
            sampling = replace(
                sampling, seed=seed, max_new_tokens=min(sampling.max_new_tokens, room)
            )
        state.waits_for = "the generator"
        with waiting("attempts", GENERATE, "generator", self.timeout_s):
            # Generators without a media parameter serve text prompts too.
            media = [strand.media] if strand.media else []
            tokens = strand.record.tokens()
            generation = self.generator.generate(tokens, sampling, *media)
            completion = await trace_request(generation, len(tokens), sampling)
        state.waits_for = "the environment"
        start = strand.record.length
        strand.record.add(Owner.POLICY, completion.tokens, completion)
        message, n_malformed = self._parse_answer(state, completion)
        finished = completion.stop.finished
        turn = Turn(
            start,
            strand.record.length,
            cut=not finished,
            malformed_call=n_malformed > 0,
            malformed_thinking=has_malformed_thinking(message.text, cut=not finished),
        )
        state.messages.append(message)
        state.turn_tokens.extend(completion.tokens.tolist())
        state.metrics["turns"] += 1
        if completion.stop is StopReason.ABORTED:
            return True, Cancelled("aborted")
        if media_token := self.renderer.find_media_token(completion.tokens):
            return True, Failed(
                "data", f"the policy wrote {media_token}, which stands for media that do not exist"
            )
        if not finished:
            strand.turns.append(turn)
            return True, Truncated()
        with self._waiting("step", state.environment):
            step = await step_environment(state.environment, message)
        strand.turns.append(
            replace(turn, reward=step.reward, state_key=step.state_key, terminated=step.done)
        )
        for name, value in (step.metrics or {}).items():
            state.metrics[name] = state.metrics.get(name, 0.0) + float(value)
        if not step.done:
            await self._append_observation(state, step.messages)
        return step.done, None

    async def _reward_cut_attempt(self, state: EpisodeState) -> None:
        """Add the environment's reward for a cut-off attempt to the attempt's last turn."""
        environment = state.environment
        with self._waiting("reward_cut_attempt", state.environment):
            reward = await reward_cut_attempt(environment, state.messages)
        if reward is None:
            return
        turns = next(strand.turns for strand in reversed(state.strands) if strand.turns)
        turns[-1] = replace(turns[-1], reward=(turns[-1].reward or 0.0) + reward)

    def _waiting(self, name: str, environment: Environment) -> Wait:
        return waiting(
            "attempts", name, f"environment {type(environment).__name__}", self.timeout_s
        )

    def _parse_answer(self, state: EpisodeState, completion: Completion) -> tuple[Message, int]:
        """Return the answer as a message, and the number of malformed tool calls in it."""
        tokens = completion.tokens.tolist()
        if state.turn_tokens:
            continued = self.renderer.parse_continued(state.turn_tokens, tokens, completion.stop)
            return continued, 0
        if state.tools is None:
            return self.renderer.parse(tokens, completion.stop), 0
        n_calls = sum(len(message.tool_calls) for message in state.messages)
        message, n_malformed = self.renderer.parse_calls(
            tokens, completion.stop, tools=state.tools, first=n_calls
        )
        state.metrics["malformed_tool_calls"] += n_malformed
        return message, n_malformed

    async def _append_observation(
        self, state: EpisodeState, observation: Sequence[Message]
    ) -> None:
        """Append the environment's messages, in a new strand if the history can't continue.

        Inline text continues the policy's turn instead.
        """
        state.strand.message_count = len(state.messages)
        if observation[0].role == "inline":
            await self._append_inline(state, observation)
            return
        start = state.turn_starts[-1]
        # With inline text the turn has several messages, which the template sees as one.
        (reply,) = merge_inline(state.messages[start:])[0]
        sampled, state.turn_tokens = state.turn_tokens, []
        state.messages.extend(observation)
        n_turns = int(state.metrics["turns"])
        state.last_rendered = f"the reply of {type(state.environment).__name__} to turn {n_turns}"
        if self.history_window is not None:
            if state.environment.raw_observations:
                raise DataError(
                    "raw observations extend the tokens of the turns before them, and "
                    "rollouts.history_window drops these: remove rollouts.history_window"
                )
            prompt = await observe(
                state.environment,
                state.task,
                state.messages,
                state.turn_starts,
                self.history_window,
            )
            await self._begin_strand(state, prompt)
        elif state.environment.raw_observations:
            work = partial(self._encode_raw, sampled, observation)
            new_tokens = await _render(state, observation, work)
            state.strand.record.add(Owner.ENVIRONMENT, new_tokens)
        elif not await self._extend_strand(state, sampled, reply, observation):
            await self._begin_strand(state, state.messages)
        state.turn_starts.append(len(state.messages))

    async def _begin_strand(self, state: EpisodeState, messages: Sequence[Message]) -> None:
        """Begin a strand whose prompt is `messages`."""
        work = partial(render_prompt, self.renderer, messages, state.tools)
        prompt, media = await _render(state, messages, work)
        state.strands.append(EpisodeStrand(media=media))
        state.strand.record.add(Owner.PROMPT, prompt)

    async def _extend_strand(
        self,
        state: EpisodeState,
        sampled: Sequence[int],
        reply: Message,
        observation: Sequence[Message],
    ) -> bool:
        """Append an observation to the strand; False if the template rewrites the turn before it.

        Args:
            sampled: The tokens of that turn.
            reply: The message that was parsed from them.
        """
        history = tuple(state.messages[: state.turn_starts[-1]])
        tools, renderer = state.tools, self.renderer

        def render() -> tuple[np.ndarray, tuple[PlacedMedium, ...]] | None:
            if not renderer.keeps_turn(
                sampled, observation, history=history, reply=reply, tools=tools
            ):
                return None
            extension = renderer.extend(sampled, observation, history=history, tools=tools)
            return np.asarray(extension, dtype=np.int64), renderer.media(extension, observation)

        rendered = await _render(state, (*history, *observation), render)
        if rendered is None:
            return False
        new_tokens, media = rendered
        start = state.strand.record.length
        state.strand.record.add(Owner.ENVIRONMENT, new_tokens)
        state.strand.media += tuple(placed._replace(start=start + placed.start) for placed in media)
        return True

    def _encode_raw(self, sampled: Sequence[int], observation: Sequence[Message]) -> list[int]:
        """Return the tokens of an observation without the chat template."""
        if any(message.media for message in observation):
            raise DataError(
                "raw observations are text, and this one has media: set raw_observations = False"
            )
        return self.renderer.encode_raw(sampled, observation, allow_special=True)

    async def _append_inline(self, state: EpisodeState, observation: Sequence[Message]) -> None:
        if state.tools is not None:
            raise UserCodeFailed(
                f"{type(state.environment).__name__}.step returned inline text, and the task "
                "offers tools: a call can't be read from a continued turn, so offer one of both"
            )
        work = partial(self.renderer.encode_raw, state.turn_tokens, observation)
        new_tokens = await _render(state, observation, work)
        state.messages.extend(observation)
        state.turn_tokens.extend(new_tokens)
        state.strand.record.add(Owner.ENVIRONMENT, new_tokens)


async def _render(state: EpisodeState, messages: Sequence[Message], work: Callable[[], T]) -> T:
    state.waits_for = "the tokenizer"
    return await run_beside_loop(messages, work)
