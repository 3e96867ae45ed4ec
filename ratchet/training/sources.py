"""Create the source of a stage's groups, and the manager and the player of its rollouts.

A source makes groups of rows, pairs, labelled answers or steps, or of rollouts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ratchet.algorithms.base import Algorithm
from ratchet.config.experience import RolloutsConfig
from ratchet.data.chat.renderer import Renderer
from ratchet.data.chat.task_variables import get_task_renderer
from ratchet.errors import MissingDependency, RowTooLong
from ratchet.experience.openai_proxy.agents import Agent
from ratchet.experience.openai_proxy.config import LOCAL_SERVER, AgentServerSettings
from ratchet.experience.rollout.episode import EpisodePlayer
from ratchet.experience.rollout.manager import (
    AttemptPlayer,
    GroupEnvironment,
    GroupPlayer,
    RolloutManager,
)
from ratchet.experience.seeds import derive_seed
from ratchet.experience.sources.curriculum import Curriculum
from ratchet.experience.sources.offline import (
    LabelledSource,
    PairSource,
    SteppedSource,
    SupervisedSource,
    TextRenderer,
)
from ratchet.experience.sources.rollouts import RolloutSource, StreamSource
from ratchet.experience.sources.tasks import TaskStream
from ratchet.protocols import Generator, Reward
from ratchet.training.stage import EnvSetup, Policy, StageSpec
from ratchet.types import Task


def _make_stream(setup: EnvSetup, spec: StageSpec) -> TaskStream:
    """Return the tasks of a stage, in the stage's own order.

    `spec.examples` selects tasks by the run's seed alone, so every stage gets the same ones.
    """
    options: dict[str, Any] = {
        "seed": derive_seed(spec.seed, spec.name, "tasks"),
        "examples": spec.examples,
        "pool_seed": spec.seed,
    }
    if spec.curriculum is None:
        return TaskStream(setup.environment, **options)
    return Curriculum(setup.environment, spec.curriculum, tasks_per_step=spec.batch_size, **options)


def _make_text_renderer(policy: Policy, algorithm: Algorithm) -> TextRenderer:
    return TextRenderer(
        policy.renderer, max_context=policy.model.max_positions, temperature=algorithm.temperature
    )


def _make_supervised(
    policy: Policy, setup: EnvSetup, algorithm: Algorithm, spec: StageSpec, manager: GroupPlayer
) -> StreamSource:
    return SupervisedSource(
        _make_stream(setup, spec),
        spec.name,
        _make_text_renderer(policy, algorithm),
        train=algorithm.turns,
        history_window=spec.rollouts.history_window,
    )


def make_pairs(
    policy: Policy,
    setup: EnvSetup,
    algorithm: Algorithm,
    spec: StageSpec,
    manager: GroupPlayer | None = None,
) -> PairSource:
    """Return the source of preference pairs. `manager` is unused: pairs need no rollouts."""
    return PairSource(_make_stream(setup, spec), spec.name, _make_text_renderer(policy, algorithm))


def _make_labelled(
    policy: Policy, setup: EnvSetup, algorithm: Algorithm, spec: StageSpec, manager: GroupPlayer
) -> StreamSource:
    return LabelledSource(
        _make_stream(setup, spec),
        spec.name,
        _make_text_renderer(policy, algorithm),
        uses_mismatched_pairs=algorithm.uses_mismatched_pairs,
    )


def _make_stepped(
    policy: Policy, setup: EnvSetup, algorithm: Algorithm, spec: StageSpec, manager: GroupPlayer
) -> StreamSource:
    return SteppedSource(
        _make_stream(setup, spec), spec.name, _make_text_renderer(policy, algorithm)
    )


def _make_rollouts(
    policy: Policy, setup: EnvSetup, algorithm: Algorithm, spec: StageSpec, manager: GroupPlayer
) -> StreamSource:
    max_context = policy.model.max_positions

    def check_prompt(task: Task) -> None:
        tools = setup.environment.tools(task) or None
        length = len(get_task_renderer(policy.renderer, task).prompt(task.messages, tools))
        if length >= max_context:
            raise RowTooLong(
                f"{task.where}: the prompt has {length} tokens, but the model holds {max_context}: "
                "shorten or drop the prompt"
            )

    return RolloutSource(
        _make_stream(setup, spec),
        spec.name,
        manager,
        sampling=replace(spec.sampling, routes=algorithm.replays_routes),
        seed=derive_seed(spec.seed, spec.name, "rollouts"),
        group_size=algorithm.group_size,
        greedy_baseline=algorithm.greedy_baseline,
        redundant_attempts=spec.rollouts.redundant_attempts,
        redundant_groups=spec.rollouts.redundant_groups,
        check_prompt=check_prompt,
    )


SOURCES: dict[
    str, Callable[[Policy, EnvSetup, Algorithm, StageSpec, GroupPlayer], StreamSource]
] = {
    "rows": _make_supervised,
    "pairs": make_pairs,
    "labelled": _make_labelled,
    "steps": _make_stepped,
    "rollouts": _make_rollouts,
}


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
    # If the renderer can't read the tool calls of its own template, fail now. Otherwise attempts
    # would count them as malformed.
    if setup.environment.has_tools:
        renderer.check_tool_calls()
    environment, manager_class = setup.environment, RolloutManager
    if isinstance(environment, GroupEnvironment):
        manager_class = environment.manager_class
    return manager_class(
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
        return EpisodePlayer(generator, renderer, history_window=rollouts.history_window, **limits)
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
