"""Build the parts of a stage's run from a recipe; `ratchet.training.build` assembles them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ratchet.config.base import Section
from ratchet.config.resolve import build
from ratchet.config.schema import RunConfig, StageConfig, get_default_rewards
from ratchet.config.sections import EnvironmentConfig
from ratchet.environments.build import build_environment
from ratchet.experience.openai_proxy.config import LOCAL_SERVER, AgentServerSettings
from ratchet.models.lora.decoder import Adapter
from ratchet.protocols import Environment, Reward
from ratchet.rewards.judge_models.base import Judges
from ratchet.rewards.weighted_sum import compose_rewards
from ratchet.training.build import make_run
from ratchet.training.from_config import (
    get_adapter_base_dir,
    get_chat_template,
    get_tokenizer_config,
)
from ratchet.training.run import StageRun
from ratchet.training.stage import EnvSetup, Policy, StageSpec, WorkerRolloutSpec
from ratchet.types import Sampling
from ratchet.utils.process_settings import restore_settings


def build_env_setup(
    stage: StageConfig, environment: Environment | None = None, *, judges: Judges | None = None
) -> EnvSetup:
    """Return the environment and rewards of a stage.

    Args:
        stage: The stage.
        environment: Its environment, if it has been built already.
        judges: The recipe's judges by name, for the rewards; None if nothing will be judged.
    """
    agent: Any = stage.agent  # `Any`: the schema adds the server's keys to the agent's section
    agent_server = (
        LOCAL_SERVER
        if agent is None
        else AgentServerSettings(agent.ignore, agent.host, agent.public_host)
    )
    return EnvSetup(
        environment or build_environment(stage.environment),
        reward=build_reward(stage.rewards, judges),
        eval_reward=build_reward(stage.eval_rewards, judges),
        agent=None if agent is None else build(agent),
        agent_server=agent_server,
        second_opinion=build_reward(stage.sentinels.second_opinion, judges),
        canaries=None
        if stage.sentinels.canaries is None
        else build_environment(stage.sentinels.canaries),
        evaluation=None
        if stage.evaluation.environment is None
        else _build_evaluation_setup(stage, stage.evaluation.environment, judges),
        judges=judges or {},
    )


def build_eval_env_setup(environment: EnvironmentConfig) -> EnvSetup:
    """Return the setup of an environment with its default rewards, for an evaluation."""
    return EnvSetup(
        build_environment(environment), reward=build_reward(get_default_rewards(environment))
    )


def _build_evaluation_setup(
    stage: StageConfig, section: EnvironmentConfig, judges: Judges | None
) -> EnvSetup:
    """Return the setup of `evaluation.environment`, whose section is `section`."""
    environment = build_environment(section)
    rewards = choose_eval_rewards(stage, environment)
    return EnvSetup(environment, reward=build_reward(rewards, judges), judges=judges or {})


def choose_eval_rewards(stage: StageConfig, environment: Environment) -> Sequence[Section]:
    """Return the rewards that judge held-out answers; none if the environment's steps judge them.

    Without an `evaluation.environment` these are the stage's `eval_rewards`. Otherwise they are:
    - the default rewards of `evaluation.environment`, if it has default rewards;
    - none, if its steps give rewards;
    - else `eval_rewards`, unless they are only the default rewards of the stage's environment.

    Args:
        stage: The stage.
        environment: The environment of the evaluation, already built.
    """
    section = stage.evaluation.environment
    if section is None:
        return stage.eval_rewards
    rewards = get_default_rewards(section)
    if rewards or environment.returns_rewards:
        return rewards
    is_environment_default = stage.eval_rewards == get_default_rewards(stage.environment)
    return () if is_environment_default else stage.eval_rewards


def build_reward(sections: Sequence[Section], judges: Judges | None = None) -> Reward | None:
    """Return the weighted sum of the rewards; None if there are none.

    With None the environment's steps give the reward.

    Args:
        sections: The sections of the rewards.
        judges: The recipe's judges by name; None if none are running.
    """
    if not sections:
        return None
    reward = compose_rewards(sections)
    if judges is not None:
        reward.use_judges(judges)
    return reward


def build_run(
    config: RunConfig,
    index: int,
    policy: Policy,
    *,
    directory: Path = Path("runs"),
    environment: Environment | None = None,
    judges: Judges | None = None,
    **run_fields: Any,
) -> StageRun:
    """Return the run of stage `index`, whose step numbers follow those of the earlier stages.

    Args:
        config: The recipe.
        index: Index of the stage.
        policy: The model to train.
        directory: The run directory.
        environment: The stage's environment, if it has been built already.
        judges: The recipe's judges by name; None if it has none.
        run_fields: Further arguments of `make_run`, and fields of `StageRun`.
    """
    stage = config.stages[index]
    spec = replace(
        build_stage_spec(config, index),
        directory=directory,
        adapter=build_adapter(config, index, directory),
    )
    setup = build_env_setup(stage, environment, judges=judges)
    algorithm = build(stage.algorithm)
    restore_settings()  # modules and constructors of the recipe's own may have changed them
    return make_run(
        policy,
        setup,
        algorithm,
        spec,
        save_every=stage.checkpoint.every,
        **run_fields,
    )


def build_stage_spec(config: RunConfig, index: int) -> StageSpec:
    """Return the specification of stage `index`."""
    stage = config.stages[index]
    return StageSpec(
        name=stage.name,
        steps=stage.n_steps,
        batch_size=stage.batch_size,
        sampling=Sampling(**dict(stage.sampling)),
        optimizer=stage.optimizer,
        learner=stage.learner,
        evaluation=stage.evaluation,
        rollouts=stage.rollouts,
        examples=stage.examples,
        curriculum=stage.curriculum,
        seed=config.seed,
        start_step=sum(earlier.n_steps for earlier in config.stages[:index]),
        parity=stage.parity,
        sentinels=stage.sentinels,
        algorithm=stage.algorithm,
        weight_sync=stage.weight_sync,
        takes_turns=config.cluster.takes_turns,
        worker_rollouts=_make_worker_rollouts(config, stage),
    )


def _make_worker_rollouts(config: RunConfig, stage: StageConfig) -> WorkerRolloutSpec | None:
    """Return the spec with which workers play the stage's groups; None if they play none."""
    if not stage.is_played_by_workers:
        return None
    tokenizer_config = get_tokenizer_config(config)
    return WorkerRolloutSpec(
        stage.environment.model_dump(mode="json"),
        [reward.model_dump(mode="json") for reward in stage.rewards],
        stage.rollouts,
        get_chat_template(config),
        tokenizer_config.tool_format,
        tokenizer_config.date,
    )


def build_adapter(config: RunConfig, index: int, directory: Path) -> Adapter | None:
    """Return the adapter that a stage trains instead of the model's weights; None without `lora`.

    Args:
        config: The recipe.
        index: Index of the stage.
        directory: The run directory.
    """
    stage = config.stages[index]
    if stage.lora is None:
        return None
    base = get_adapter_base_dir(config, index, directory)
    path = str(config.model.path)
    # The adapter's files name its base model, and are read from other working directories too.
    if base is None and Path(path).is_dir():
        base = Path(path)
    location = path if base is None else str(base.absolute())
    return Adapter(stage.lora, seed=config.seed, base_model=location)
