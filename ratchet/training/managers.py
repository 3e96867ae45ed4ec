"""Create the rollout manager of a stage, and the player that it runs attempts with."""

from __future__ import annotations

from typing import Any

from ratchet.config.experience import RolloutsConfig
from ratchet.data.chat.renderer import Renderer
from ratchet.errors import MissingDependency
from ratchet.experience.openai_proxy.agents import Agent
from ratchet.experience.openai_proxy.config import LOCAL_SERVER, AgentServerSettings
from ratchet.experience.rollout.episode import EpisodePlayer
from ratchet.experience.rollout.manager import AttemptPlayer, RolloutManager
from ratchet.protocols import Generator, Reward
from ratchet.training.stage import EnvSetup, Policy


def make_manager(
    policy: Policy,
    setup: EnvSetup,
    reward: Reward | None,
    rollouts: RolloutsConfig,
    *,
    max_context: int | None = None,
    needs_reward: bool = True,
) -> RolloutManager:
    """Return the manager of the stage's attempts.

    Args:
        policy: The policy that generates.
        setup: The environment, with its agent if it has one.
        reward: The reward that judges attempts; None takes the environment's own.
        rollouts: The limits and the number of retries.
        max_context: Maximum tokens of an attempt; None takes the model's `max_positions`.
        needs_reward: True if the algorithm reads rewards.

    Raises:
        ConfigError: The environment offers tools, and the policy's tool-call format is unknown.
    """
    player = make_player(
        policy.generator,
        policy.renderer,
        setup.agent,
        rollouts,
        max_context or policy.model.max_positions,
        setup.agent_server,
    )
    return make_manager_with_player(
        player, policy.renderer, setup, reward, rollouts, needs_reward=needs_reward
    )


def make_manager_with_player(
    player: AttemptPlayer,
    renderer: Renderer,
    setup: EnvSetup,
    reward: Reward | None,
    rollouts: RolloutsConfig,
    *,
    needs_reward: bool,
) -> RolloutManager:
    """Like `make_manager`, for an existing player."""
    # Refuse tool calls that would be counted as malformed now, not in the first attempt.
    if setup.environment.has_tools:
        renderer.check_tool_calls()
    return RolloutManager(
        player,
        setup.get_environment_factory(),
        reward,
        needs_reward=needs_reward,
        judge_timeout_s=rollouts.attempt_timeout_s,
        retries=rollouts.retries,
    )


def make_player(
    generator: Generator,
    renderer: Renderer,
    agent: Agent | None,
    rollouts: RolloutsConfig,
    max_context: int,
    agent_server: AgentServerSettings = LOCAL_SERVER,
) -> AttemptPlayer:
    """Return a player in which the policy acts itself, or an agent acts and calls the policy.

    Raises:
        MissingDependency: An agent needs a web server that is not installed.
    """
    limits: dict[str, Any] = {
        "max_context": max_context,
        "max_turns": rollouts.max_turns,
        "timeout_s": rollouts.attempt_timeout_s,
    }
    if agent is None:
        return EpisodePlayer(generator, renderer, **limits)
    try:
        # Imported here because the module needs a web server, which is an optional dependency.
        from ratchet.experience.openai_proxy.player import AgentPlayer
        from ratchet.experience.openai_proxy.server import Proxy
    except ModuleNotFoundError as missing:
        raise MissingDependency(
            str(missing.name), extra="proxy", needed_for="a stage with an agent"
        ) from missing
    proxy = Proxy(settings=agent_server)
    return AgentPlayer(agent, generator, renderer, **limits, proxy=proxy)
