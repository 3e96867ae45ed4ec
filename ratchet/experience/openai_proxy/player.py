"""A player that lets an external agent play each attempt; the agent calls the policy."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import Any

from ratchet.data.chat.renderer import Renderer
from ratchet.data.chat.task_variables import get_task_renderer
from ratchet.experience.openai_proxy.agents import Agent, run_agent
from ratchet.experience.openai_proxy.server import Proxy
from ratchet.experience.openai_proxy.session import AgentSession
from ratchet.experience.rollout.episode_state import PromptCache
from ratchet.protocols import Environment, Generator
from ratchet.types import Failed, Outcome, Sampling, Task, Trajectory, Truncated
from ratchet.utils.user_code import UserCodeFailed, run_guarded

log = logging.getLogger(__name__)

STOP_S = 5.0  # longest wait for the end of an agent that is cancelled
CANCEL_EVERY_S = 0.5


@dataclass(frozen=True)
class AgentPlayer:
    """A player that runs an agent for each attempt.

    The environment only provides the tasks: its `reset` and `step` are not called, and rewards
    judge the attempts.
    """

    agent: Agent
    generator: Generator
    renderer: Renderer
    max_context: int
    """Maximum number of tokens in the model's context."""
    max_turns: int = 64
    """Maximum number of answers that an attempt may request."""
    timeout_s: float | None = None
    """Time limit of a whole attempt in seconds; None sets no limit."""
    proxy: Proxy = field(default_factory=Proxy)

    async def play(
        self,
        task: Task,
        environment: Environment,
        sampling: Sampling,
        *,
        attempt: int,
        prompt_cache: PromptCache | None = None,
    ) -> list[Trajectory]:
        """Play an attempt and return its trajectories, in the order of their last answers.

        Their extras hold the agent's result as "result". The outcome is
        - `Failed("agent")` if the agent raised or requested no answer,
        - `Failed("timeout")` if the agent took too long,
        - `Failed("prompt_too_long")` if its first prompt did not fit the context,
        - Truncated if the context or the turns were used up, or if a limit of the run cut the last
          answer.
        """
        session = AgentSession(
            self.generator,
            get_task_renderer(self.renderer, task),
            sampling,
            max_context=self.max_context,
            max_turns=self.max_turns,
        )
        async with self.proxy.open(session) as (base_url, api_key):
            agent_task = asyncio.ensure_future(self._run_agent(task, base_url, api_key))
            try:
                await asyncio.wait(
                    {agent_task, session.ended},
                    timeout=self.timeout_s,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                was_running = not agent_task.done()
            finally:
                await _stop(agent_task)
            result, error = None, ""
            if not agent_task.done():
                log.warning("an agent did not end after it was cancelled, and keeps running")
            elif not agent_task.cancelled():
                result, error = agent_task.result()
            elif not was_running:
                error = "the agent cancelled its own task"
            if session.ended.done():
                outcome = session.ended.result()
            elif was_running:
                outcome = Failed("timeout", f"the agent took more than {self.timeout_s:g} s")
            else:
                outcome = _get_outcome(session, f"{task.label}:\n{error}" if error else "")
            return session.trajectories(attempt, outcome, {"result": result})

    async def _run_agent(self, task: Task, base_url: str, api_key: str) -> tuple[Any, str]:
        """Return (the agent's result, the traceback if it raised, else "")."""
        try:
            return await run_guarded(lambda: run_agent(self.agent, task, base_url, api_key)), ""
        except UserCodeFailed as failure:
            return None, str(failure)


async def _stop(agent_task: asyncio.Task[Any]) -> None:
    """Cancel an agent until it ends, for at most STOP_S.

    One cancellation may not be enough, because code that retries may catch it.
    """
    for _ in range(round(STOP_S / CANCEL_EVERY_S)):
        agent_task.cancel()
        done, _ = await asyncio.wait({agent_task}, timeout=CANCEL_EVERY_S)
        if done:
            break


def _get_outcome(session: AgentSession, error: str) -> Outcome | None:
    """Return the outcome of an attempt whose agent has ended; None if it ended normally."""
    latest_answer = session.latest_answer
    if latest_answer is None and session.exhausted_budget:
        return Failed(
            "prompt_too_long",
            f"{session.exhausted_budget}: shorten the prompt or drop the task",
        )
    if latest_answer is None and not error:
        return Failed(
            "agent", "it ended without requesting an answer, so there is nothing to learn from"
        )
    if session.exhausted_budget:
        return Truncated()
    if error:
        return Failed("agent", error)
    return Truncated() if latest_answer is not None and latest_answer.cut else None
