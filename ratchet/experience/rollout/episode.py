"""One attempt at one task: generate, act, observe, until the environment ends it or a budget does.
Tokens in, tokens out.

What the policy reads next normally extends what it read and wrote before, token by token. Where the
chat template won't have that (it drops the reasoning of earlier turns, say), the history forks: a
new strand begins, whose prompt is the conversation as it is rendered now. An attempt is one
trajectory a strand.

L = tokens of the trajectory so far.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeGuard, TypeVar

import numpy as np

from ratchet.data.chat.renderer import Renderer, Tools
from ratchet.errors import DataError
from ratchet.experience.rollout.user_code import UserCodeFailed, guarded, limited
from ratchet.experience.seeds import seed_for
from ratchet.observe.stall_report import GENERATE, Wait, waiting
from ratchet.protocols import Environment, Generator, OffersStops, OffersTools, Step
from ratchet.types import (
    Cancelled,
    Completion,
    Failed,
    Message,
    Outcome,
    Owner,
    Placed,
    Sampling,
    StopReason,
    Task,
    Trajectory,
    Truncated,
    Turn,
    finite,
)

P = TypeVar("P")


class PromptMemo:
    """The attempts of a group almost always begin with the same messages: their tokens are rendered
    once."""

    def __init__(self) -> None:
        self.given: tuple[Sequence[Message], Tools | None] | None = None
        self.tokens = np.zeros(0, dtype=np.int64)
        self.media: tuple[Placed, ...] = ()

    def render(
        self, renderer: Renderer, messages: Sequence[Message], tools: Tools | None
    ) -> tuple[np.ndarray, tuple[Placed, ...]]:
        if self.given != (messages, tools):
            self.tokens = np.asarray(renderer.prompt(messages, tools), dtype=np.int64)
            self.media = renderer.media(self.tokens, messages)
            self.given = list(messages), tools
        return self.tokens, self.media


@dataclass(slots=True)
class TokenRecord:
    """Token columns as they grow, piece by piece; each piece knows who wrote it."""

    pieces: list[tuple[Owner, np.ndarray, Completion | None]] = field(default_factory=list)
    length: int = 0

    def add(
        self, owner: Owner, tokens: Sequence[int] | np.ndarray, completion: Completion | None = None
    ) -> None:
        array = np.asarray(tokens, dtype=np.int64)
        self.pieces.append((owner, array, completion))
        self.length += len(array)

    def tokens(self) -> np.ndarray:
        _, first, _ = self.pieces[0]
        return (
            first
            if len(self.pieces) == 1
            else np.concatenate([tokens for _, tokens, _ in self.pieces])
        )

    def trajectory(self, **fields: Any) -> Trajectory:
        """`fields`: those of a Trajectory that are no token columns."""
        whole = np.empty(self.length, np.int64)
        owner = np.empty(self.length, np.int8)
        trainable = np.empty(self.length, np.bool_)
        logprobs = np.zeros(self.length, np.float32)
        versions = np.empty(self.length, np.int32)
        versions.fill(-1)
        kept_mass = np.zeros(self.length, np.float32)
        routes = self._routes()
        start = 0
        for who, tokens, completion in self.pieces:
            end = start + len(tokens)
            whole[start:end] = tokens
            owner[start:end] = int(who)  # numpy takes twice as long over a member of an enumeration
            trainable[start:end] = who == Owner.POLICY
            if completion is not None:
                logprobs[start:end], versions[start:end] = completion.logprobs, completion.versions
                kept_mass[start:end] = completion.log_kept_mass
            start = end
        return Trajectory(
            tokens=whole,
            owner=owner,
            trainable=trainable,
            rollout_logprobs=logprobs,
            versions=versions,
            log_kept_mass=kept_mass,
            routes=routes,
            **fields,
        )

    def _routes(self) -> np.ndarray | None:
        """A completion has those of all tokens so far. The first to compute a token says where it
        went: what a turn wrote was drawn from that forward, and only its last token and the
        environment's come from that of the next turn's prompt."""
        given = [
            one.routes for _, _, one in self.pieces if one is not None and one.routes is not None
        ]
        if not given:
            return None
        routes = np.full((self.length, *given[0].shape[1:]), -1, np.int16)
        for found in given:
            missing = routes[: len(found), 0, 0] < 0
            routes[: len(found)][missing] = found[missing]
        return routes


@dataclass(slots=True)
class Strand:
    """A stretch of an attempt in which every prompt extends the last one: it becomes one
    trajectory.

    known: messages of the conversation that it holds. media: those of all tokens so far.
    """

    record: TokenRecord = field(default_factory=TokenRecord)
    turns: list[Turn] = field(default_factory=list)
    media: tuple[Placed, ...] = ()
    known: int = 0

    @property
    def sampled(self) -> bool:
        return len(self.record.pieces) > 1  # what follows the prompt, the policy wrote first


@dataclass(slots=True)
class Play:
    """An attempt while it is played. metrics: sums over its turns."""

    task: Task
    environment: Environment
    sampling: Sampling
    messages: list[Message]
    tools: Tools | None = None
    strands: list[Strand] = field(default_factory=lambda: [Strand()])
    waits_for: str = "the environment"  # or the generator
    metrics: dict[str, float] = field(
        default_factory=lambda: {"turns": 0.0, "turn_limit": 0.0, "retries": 0.0}
    )

    @property
    def strand(self) -> Strand:
        return self.strands[-1]

    def trajectories(self, attempt: int, outcome: Outcome | None) -> list[Trajectory]:
        """One a strand, in order; a strand in which the policy wrote nothing is none, unless there
        is no other."""
        self.strand.known = len(self.messages)
        strands = [strand for strand in self.strands if strand.sampled] or self.strands[:1]
        # it broke before there was a prompt; a trajectory has at least one token
        if not strands[0].record.length:
            strands[0].record.add(Owner.PROMPT, [0])
        return [
            strand.record.trajectory(
                attempt=attempt,
                temperature=self.sampling.temperature,
                turns=tuple(strand.turns),
                messages=tuple(self.messages[: strand.known]),
                media=strand.media,
                outcome=outcome,
                metrics=self.metrics | {"forks": len(strands) - 1.0},
            )
            for strand in strands
        ]


def checked(messages: Any, where: str, environment: Environment) -> Sequence[Message]:
    if not isinstance(messages, tuple | list | Sequence) or not all(
        isinstance(message, Message) for message in messages
    ):
        raise UserCodeFailed(
            f"{type(environment).__name__}.{where} gave {messages!r:.80}, it must be a sequence of "
            "Messages"
        )
    return messages


def checked_step(step: Any, environment: Environment) -> Step:
    name = type(environment).__name__
    if not isinstance(step, Step):
        raise UserCodeFailed(f"{name}.step returned {step!r:.80}, it must be a Step")
    if step.reward is not None and not finite(step.reward):
        raise UserCodeFailed(
            f"{name}.step gave the reward {step.reward!r:.80}, it must be a finite number or None"
        )
    metrics = {} if step.metrics is None else step.metrics
    if not isinstance(metrics, dict | Mapping) or not all(map(finite, metrics.values())):
        raise UserCodeFailed(
            f"{name}.step gave the metrics {metrics!r:.80}, they must be finite numbers by name"
        )
    checked(step.messages, "step", environment)
    if not step.done and not step.messages:
        raise UserCodeFailed(
            f"{name}.step neither ended the episode nor said anything: there is nothing to answer"
        )
    return step


@dataclass(frozen=True)
class Player:
    """Plays attempts: what is common to all of them.

    max_context: tokens that the model can hold; the last turn is cut to it. timeout_s: of a whole
    attempt, waiting for the generator included; None: no limit. It reaches code that awaits; what
    blocks the process blocks its clock too.
    """

    generator: Generator
    renderer: Renderer
    max_context: int
    max_turns: int = 64
    timeout_s: float | None = None
    _follows: dict[tuple[type, type], bool] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def offers(self, environment: object, protocol: type[P]) -> TypeGuard[P]:
        """Whether environments of this class follow the protocol: asked once, as Python 3.11 takes
        as long as a turn to say."""
        key = type(environment), protocol
        if key not in self._follows:
            self._follows[key] = isinstance(environment, protocol)
        return self._follows[key]

    async def play(
        self,
        task: Task,
        environment: Environment,
        sampling: Sampling,
        *,
        attempt: int,
        memo: PromptMemo | None = None,
    ) -> list[Trajectory]:
        """The attempt's trajectories, one unless its history forked, not yet judged: `outcome`, the
        same for all, is None, or Truncated, Failed or Cancelled already. What the generator raises
        is no attempt's fault and goes up, DataError apart.

        Their metrics, those of the whole attempt: "turns", "forks", "retries" (0 here),
        "turn_limit" (1 where the last turn that is allowed did not end it), "malformed_tool_calls"
        where tools are offered, and the sums of what the environment's steps measured.

        memo: shared by the attempts of a group.
        """
        play = Play(task, environment, sampling, list(task.messages))
        outcome: Outcome | None
        limit = limited(self.timeout_s)
        try:
            async with limit:
                outcome = await self._episode(play, memo or PromptMemo())
        except TimeoutError:
            if not limit.expired():  # the generator's own
                raise
            turns = int(play.metrics["turns"])
            outcome = Failed(
                "timeout",
                f"not over after {self.timeout_s:g} s and {turns} turns, waiting for "
                f"{play.waits_for}",
            )
        except UserCodeFailed as failure:
            outcome = Failed("environment", str(failure))
        except DataError as error:  # messages that can't be rendered, a prompt that can't be read
            outcome = Failed("data", str(error))
        return play.trajectories(attempt, outcome)

    async def _episode(self, play: Play, memo: PromptMemo) -> Outcome | None:
        environment = play.environment
        with self._waiting("reset", environment):
            first = await guarded(lambda: environment.reset(play.task))
        play.messages = list(checked(first, "reset", environment))
        if self.offers(environment, OffersTools):
            # a mixture may have none for this task
            play.tools = await offered_tools(environment, play.task) or None
            play.metrics["malformed_tool_calls"] = 0
        strand = play.strand
        prompt, strand.media = memo.render(self.renderer, play.messages, play.tools)
        strand.record.add(Owner.PROMPT, prompt)
        for number in range(self.max_turns):
            room = self.max_context - play.strand.record.length
            if room <= 0:
                if number:
                    return Truncated()
                length = play.strand.record.length
                detail = (
                    f"the prompt has {length} tokens, the context {self.max_context}: "
                    "shorten "
                    "it or drop the task"
                )
                return Failed("prompt_too_long", detail)
            ended, outcome = await self._turn(play, number, room)
            if ended:
                return outcome
        play.metrics["turn_limit"] = 1
        return Truncated()

    async def _turn(self, play: Play, number: int, room: int) -> tuple[bool, Outcome | None]:
        """(whether the attempt ended with it, its outcome if it is known)"""
        own, strand, environment = play.sampling, play.strand, play.environment
        if self.offers(environment, OffersStops):
            own = replace(own, stop=tuple(dict.fromkeys((*own.stop, *environment.stop_strings))))
        if number or room < own.max_new_tokens:
            seed = seed_for(own.seed, number) if number else own.seed
            own = replace(own, seed=seed, max_new_tokens=min(own.max_new_tokens, room))
        play.waits_for = "the generator"
        with waiting("attempts", GENERATE, "generator", self.timeout_s):
            media = [strand.media] if strand.media else []  # a generator need not know of any
            completion = await self.generator.generate(strand.record.tokens(), own, *media)
        play.waits_for = "the environment"
        start = strand.record.length
        strand.record.add(Owner.POLICY, completion.tokens, completion)
        message, history = self._read(play, completion), tuple(play.messages)
        play.messages.append(message)
        play.metrics["turns"] += 1
        if completion.stop is StopReason.ABORTED:
            return True, Cancelled("aborted")
        if stray := self.renderer.stray(completion.tokens):
            return True, Failed(
                "data", f"the policy wrote {stray}, which stands for a medium, and there is none"
            )
        if not completion.stop.finished:
            strand.turns.append(Turn(start, strand.record.length, cut=True))
            return True, Truncated()
        with self._waiting("step", play.environment):
            answer = await guarded(lambda: play.environment.step(message))
        step = checked_step(answer, play.environment)
        strand.turns.append(
            Turn(start, strand.record.length, step.reward, step.state_key, step.done, cut=False)
        )
        for name, measured in (step.metrics or {}).items():
            play.metrics[name] = play.metrics.get(name, 0.0) + float(measured)
        if not step.done:
            self._observe(play, completion, history, step.messages)
        return step.done, None

    def _waiting(self, name: str, environment: Environment) -> Wait:
        return waiting(
            "attempts", name, f"environment {type(environment).__name__}", self.timeout_s
        )

    def _read(self, play: Play, completion: Completion) -> Message:
        tokens = completion.tokens.tolist()
        if play.tools is None:
            return self.renderer.parse(tokens, completion.stop)
        calls = sum(len(message.tool_calls) for message in play.messages)
        message, malformed = self.renderer.parse_calls(
            tokens, completion.stop, tools=play.tools, first=calls
        )
        play.metrics["malformed_tool_calls"] += malformed
        return message

    def _observe(
        self,
        play: Play,
        completion: Completion,
        history: Sequence[Message],
        answers: Sequence[Message],
    ) -> None:
        """Appends what the environment said; where earlier turns would have to change for it,
        begins a new strand."""
        said = play.messages[-1]
        play.strand.known = len(play.messages)
        play.messages.extend(answers)
        sampled = completion.tokens.tolist()
        if self.renderer.keeps(sampled, answers, history=history, said=said, tools=play.tools):
            added = self.renderer.extend(sampled, answers, history=history, tools=play.tools)
            start = play.strand.record.length
            play.strand.record.add(Owner.ENVIRONMENT, added)
            more = self.renderer.media(added, answers)
            play.strand.media += tuple(one._replace(start=start + one.start) for one in more)
        else:
            play.strands.append(Strand())
            prompt = self.renderer.prompt(play.messages, play.tools)
            play.strand.record.add(Owner.PROMPT, prompt)
            play.strand.media = self.renderer.media(prompt, play.messages)


async def offered_tools(environment: OffersTools, task: Task) -> Tools:
    async def ask() -> Any:
        return environment.tools(task)

    tools = await guarded(ask)
    if not isinstance(tools, Sequence) or not all(isinstance(tool, Mapping) for tool in tools):
        name = type(environment).__name__
        raise UserCodeFailed(
            f"{name}.tools gave {tools!r:.80}, it must be a sequence of JSON-schema function "
            "descriptions"
        )
    return tuple(tools)
