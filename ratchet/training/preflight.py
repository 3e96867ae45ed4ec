"""Open what a recipe names before anything is trained: model, tokenizer, data, tools and rewards.

A recipe can be valid and still name a file that is missing, a column that no row has, or a reward
that can't be called. On a cluster such a mistake costs a place in the queue, and in a later stage
the work of the earlier ones.
"""

from __future__ import annotations

import asyncio
import copy
import sys
import traceback
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from ratchet.algorithms.config.policy_gradient import PolicyGradientConfig
from ratchet.algorithms.config.shaping import EffortLength
from ratchet.config.base import Section
from ratchet.config.resolve import build, import_object
from ratchet.config.schema import RunConfig, StageConfig
from ratchet.config.sections import JudgeSection
from ratchet.data.chat.renderer import Renderer
from ratchet.data.chat.task_variables import get_task_renderer
from ratchet.data.chat.tokenizer_loading import load_tokenizer
from ratchet.environments.build import build_environment
from ratchet.environments.mixture import MixtureConfig, get_part_tag
from ratchet.environments.single_turn import Procedural
from ratchet.errors import ConfigError, DataError, ModelError, RatchetError
from ratchet.executors import env_vars
from ratchet.executors.event_loop import run_event_loop
from ratchet.experience.async_rollouts.group_filter import build_group_filter
from ratchet.experience.rollout.environment_answers import close_environment, reset_environment
from ratchet.experience.sources.offline import TextRenderer
from ratchet.experience.sources.render_task import OFFLINE_SOURCES, render_task
from ratchet.learners.config import DistributedConfig
from ratchet.models.load import find_model, is_hub_id, read_model_config
from ratchet.models.policy import UNLIMITED
from ratchet.protocols import Environment, Reward
from ratchet.training.evaluators import explain_no_answers
from ratchet.training.from_config import (
    build_renderer,
    check_stage_roles,
    load_policy_processor,
)
from ratchet.training.saved_weights import find_saved
from ratchet.training.stage_from_config import build_reward, choose_eval_rewards
from ratchet.training.workers.judges import check_judge_files, read_context
from ratchet.types import Failed, Message, Outcome, Split, Task, Trajectory
from ratchet.utils.object_store import is_address
from ratchet.utils.user_code import (
    UserCodeFailed,
    is_user_error,
    leave_when_cancelled,
    run_guarded,
)
from ratchet.utils.user_frames import describe_user_error

RESET_TIMEOUT_S = 60.0
JUDGE_TIMEOUT_S = 600.0  # tests of programs may take minutes
MAX_TAGGED_TASKS = 1000  # tasks of an endless stream whose tags are read
MADE_UP_ANSWER = "0"  # judged where the environment has no demonstration


@dataclass
class PreflightReport:
    """The findings of `run_preflight`."""

    opened: list[str] = field(default_factory=list)
    """A line for each file, data split or reward that was opened."""
    warnings: list[str] = field(default_factory=list)
    """Sentences on what may be wrong."""
    problems: list[tuple[str, BaseException]] = field(default_factory=list)
    """Errors by the recipe's section."""

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Record an error inside the block as a problem of the section `name`."""
        try:
            yield
        except BaseException as error:  # classes of users may raise anything, and may call sys.exit
            if not is_user_error(error):
                raise
            known_messages = {str(problem) for _, problem in self.problems}
            if str(error) not in known_messages:
                self.problems.append((name, error))

    def raise_problems(self) -> None:
        """Raise the only problem as it is, or one ConfigError with all of them."""
        if not self.problems:
            return
        error = self.problems[0][1]
        if len(self.problems) == 1 and isinstance(error, RatchetError):
            raise error
        lines = [f"{name}: {_describe(error)}" for name, error in self.problems]
        if len(lines) == 1:
            raise ConfigError(lines[0]) from error
        raise ConfigError("\n  ".join([f"{len(lines)} problems:", *lines])) from error


def run_preflight(config: RunConfig, *, scan: bool = True) -> PreflightReport:
    """Open the recipe's model directory, tokenizer, tools and rewards, and a row of each data set.

    Nothing is trained, no weights are loaded, and nothing is downloaded. A model on the Hub or at
    an address is not opened, and rewards that call a service or load a model are not called.

    scan: Read all rows of data sets whose section has scan=true. A run passes False, because it
      scans them anyway.
    """
    report = PreflightReport()
    renderer = None
    if _is_local(config):
        with report.section("model"):
            renderer = _open_model(config, report)
    else:
        report.opened.append(f"model: {config.model.path} is not on this machine, and not opened")
    with report.section("generator"):
        # The first stage's generator serves all stages.
        generator = config.stages[0].generator.sampler
        with env_vars.set_env_defaults(generator.environment):
            generator.check_arguments()
    for judge in config.judges:
        with report.section(f"judges.{judge.name}"):
            _open_judge(judge, report)
    for stage in config.stages:
        check = _StageCheck(config, stage, renderer, report, scan)
        with report.section(f"stages.{stage.name}.algorithm"):
            check.open_roles()
        with report.section(f"stages.{stage.name}"):
            check.open_training_data()
        with report.section(f"stages.{stage.name}.rollouts.group_filter"):
            if stage.rollouts.group_filter is not None:
                build_group_filter(stage.rollouts.group_filter)
        with report.section(f"stages.{stage.name}.evaluation"):
            check.open_evaluation()
    report.opened = list(dict.fromkeys(report.opened))
    report.warnings = list(dict.fromkeys(report.warnings))
    return report


def _is_local(config: RunConfig) -> bool:
    return config.model.path is None or not _is_remote(config.model.path)


def _is_remote(path: str) -> bool:
    return is_address(path) or is_hub_id(path)


def _open_model(config: RunConfig, report: PreflightReport) -> Renderer | None:
    """Return the renderer of the recipe's tokenizer, and read the model's config.json.

    Return None if the model is a checkpoint of a run, because a checkpoint has neither tokenizer
    nor config.json before it is exported.
    """
    path = config.model.path
    processor = None
    saved = None if path is None else find_saved(path)
    if saved is not None and saved.step is not None:
        report.opened.append(f"model: step {saved.step} of {saved.run}, exported at the start")
        return None
    if saved is not None:
        path = str(saved.path)
        config = config.model_copy(update={"model": config.model.model_copy(update={"path": path})})
    if path is not None:
        directory = find_model(path)
        content = read_model_config(
            directory,
            config.model.overrides,
            backend=config.model.backend,
            trust_remote_code=config.model.trust_remote_code,
        )
        architecture = content.get("architectures") or ["unnamed"]
        report.opened.append(f"model: {path}, {', '.join(map(str, architecture))}")
        for stage in config.stages:
            _check_learner(stage, content, config.model.backend)
        processor = load_policy_processor(config)
    tokenizer = build(config.tokenizer, path)
    report.opened.append(f"tokenizer: {tokenizer.vocab_size:,} tokens")
    return build_renderer(config, tokenizer, processor)


def _check_learner(stage: StageConfig, content: Mapping[str, Any], backend: str) -> None:
    """Raise ModelError or ConfigError if the learner can't train the model of a config.json."""
    learner = stage.learner
    if isinstance(learner, DistributedConfig) and learner.config_check is not None:
        import_object(learner.config_check)(learner, content, stage.lora, backend)


def _open_judge(judge: JudgeSection, report: PreflightReport) -> None:
    """Open a judge's tokenizer and template, and check its generator's arguments."""
    if is_address(judge.path) or is_hub_id(judge.path):
        report.opened.append(
            f"judge {judge.name}: {judge.path} is not on this machine, and not opened"
        )
        return
    try:
        directory = find_model(judge.path)
        context = read_context(directory)
        renderer = Renderer(load_tokenizer(directory), judge.template)
        check_judge_files(judge, directory)
    except ModelError as error:
        raise ConfigError(
            f"{error}. If another run makes this model, finish that run first"
        ) from error
    renderer.prompt([Message("user", MADE_UP_ANSWER)])
    limit = "" if context == UNLIMITED else f", {context:,} tokens of context"
    report.opened.append(f"judge {judge.name}: {judge.path}, {judge.kind_name}{limit}")


@dataclass
class _StageCheck:
    """The check of one stage's data, tools and rewards."""

    config: RunConfig
    stage: StageConfig
    renderer: Renderer | None
    report: PreflightReport
    scan: bool

    def open_training_data(self) -> None:
        """Open the training split, and render or judge its first task."""
        stage = self.stage
        section = stage.environment
        if not self.scan and section.has_scan:
            section = section.without_scan()
        with self._open_environment(section) as environment:
            task = self._open_split(environment, "train")
            if task is None:
                raise DataError(f"{type(environment).__name__} has no training task")
            self._check_shaping_tags(environment)
            if stage.source in OFFLINE_SOURCES:
                self._render(environment, task)
            else:
                self._reset_and_judge(environment, task, stage.rewards)

    @contextmanager
    def _open_environment(self, section: Section) -> Iterator[Environment]:
        """Build an environment for the block. An error of its `close` is a further problem."""
        environment = build_environment(section)
        try:
            yield environment
        finally:
            with self.report.section(f"stages.{self.stage.name}"):
                run_event_loop(close_environment(environment))

    def open_roles(self) -> None:
        """Open the tokenizers of teachers and references, and compare them with the policy's."""
        algorithm = build(self.stage.algorithm)
        paths = [role.path for role in algorithm.roles.values() if role.path is not None]
        if self.renderer is None or not paths or any(map(_is_remote, paths)):
            return
        tokenizer = self.renderer.tokenizer
        check_stage_roles(self.stage, algorithm, tokenizer.vocab_size, tokenizer)
        self.report.opened.append(f"{self.stage.name}: {', '.join(paths)}")

    def _check_shaping_tags(self, environment: Environment) -> None:
        """Raise ConfigError for tags of `effort_length` that no task has: they shape nothing.

        Only the first tasks of an endless stream are read, so such a tag there is a warning.
        """
        algorithm = self.stage.algorithm
        parts = algorithm.shaping if isinstance(algorithm, PolicyGradientConfig) else ()
        tags = {tag for part in parts if isinstance(part, EffortLength) for tag in part.tags}
        known_tags: set[str] = set()
        has_seen_all = True
        if not tags:
            return
        if isinstance(self.stage.environment, MixtureConfig):
            known_tags = {get_part_tag(part) for part in self.stage.environment.parts}
        else:
            n_tasks = environment.task_count()
            tasks = iter(environment.tasks("train", seed=self.config.seed))
            for task in islice(tasks, MAX_TAGGED_TASKS if n_tasks is None else n_tasks):
                known_tags.add(task.tag)
                if tags <= known_tags:
                    return
            has_seen_all = n_tasks is not None or next(tasks, None) is None
        if tags <= known_tags:
            return
        unknown, known = (", ".join(sorted(names)) for names in (tags - known_tags, known_tags))
        if has_seen_all:
            raise ConfigError(
                f"effort_length.tags has {unknown}, and the tasks have {known}: name these, or "
                "set the tag of a part or a row"
            )
        self.report.warnings.append(
            f"{self.stage.name}: effort_length.tags has {unknown}, and the first "
            f"{MAX_TAGGED_TASKS:,} tasks have {known}: a tag that no later task has shapes nothing"
        )

    def open_evaluation(self) -> None:
        """Open the split of the evaluation, and render or judge its first task."""
        settings = self.stage.evaluation
        if not settings.tasks or self.report.problems:
            return
        section = settings.environment or self.stage.environment
        if not self.scan and section.has_scan:
            return  # the rows to hold out are only known after a scan
        with self._open_environment(section) as environment:
            # A held-out row may be checked only when its task is read, so `ratchet check` reads all
            # tasks of the evaluation.
            n_tasks = settings.tasks if self.scan else 1
            task = self._open_split(environment, "test", n_tasks)
            if task is None:
                return
            rewards = choose_eval_rewards(self.stage, environment)
            is_judged = bool(rewards) or environment.returns_rewards
            if not is_judged and self.stage.source in OFFLINE_SOURCES:
                self._render_held_out(environment, task)
            if rewards != self.stage.rewards:
                self._judge(environment, task, rewards, "eval_rewards")

    def _open_split(self, environment: Environment, split: Split, n_tasks: int = 1) -> Task | None:
        """Read `n_tasks` tasks of a split, and return the first; None if the split is empty."""
        tasks = islice(environment.tasks(split, seed=self.config.seed), n_tasks)
        task = next(tasks, None)
        deque(tasks, maxlen=0)  # reads the rest without keeping it
        if task is not None:
            self.report.opened.append(f"{self.stage.name}, {split} split: {task.where}")
            self._check_purity(environment, split, task)
        return task

    def _check_purity(self, environment: Environment, split: Split, task: Task) -> None:
        """Warn if a procedural environment makes another first task when it is read again."""
        if not isinstance(environment, Procedural):
            return
        reread = next(environment.tasks(split, seed=self.config.seed), None)
        if reread is None or reread.messages != task.messages:
            name = type(environment).__name__
            self.report.warnings.append(
                f"{self.stage.name}: {name}.sample makes another {split} task each time, so "
                "resumed runs and comparisons are not exact. Draw from its `rng` alone"
            )

    def _render_held_out(self, environment: Environment, task: Task) -> None:
        """Render a held-out task, for an evaluation that only measures a loss or compares pairs."""
        try:
            self._render(environment, task, "a held-out row")
        except RatchetError as error:
            if self.stage.source not in ("rows", "pairs"):
                raise
            raise ConfigError(explain_no_answers(str(self.stage.source), str(error))) from error

    def _render(self, environment: Environment, task: Task, noun: str = "a row") -> None:
        """Render the rows of a task that the algorithm would train on."""
        if self.renderer is None:
            return
        turns = build(self.stage.algorithm).turns
        rows = render_task(
            environment,
            task,
            self.renderer,
            str(self.stage.source),
            turns=turns,
            history_window=self.stage.rollouts.history_window,
        )
        lengths = ", ".join(f"{len(row):,}" for row in rows)
        self.report.opened.append(f"{self.stage.name}: {noun} has {lengths} tokens")

    def _reset_and_judge(
        self, environment: Environment, task: Task, rewards: Sequence[Section]
    ) -> None:
        """Reset a copy of the environment to the task, and judge the task's demonstration."""
        player_environment = copy.copy(environment)
        messages = run_event_loop(self._reset(player_environment, task))
        if self.stage.rollouts.history_window is not None and player_environment.raw_observations:
            raise ConfigError(
                "raw observations extend the tokens of the turns before them, and "
                "rollouts.history_window drops these: remove rollouts.history_window"
            )
        if self.renderer is not None:
            if environment.has_tools:
                self.renderer.check_tool_calls()
            tokens = get_task_renderer(self.renderer, task).prompt(list(messages))
            self.report.opened.append(f"{self.stage.name}: a prompt has {len(tokens):,} tokens")
        if rewards:
            self._judge(environment, task, rewards, "rewards")

    async def _reset(self, environment: Environment, task: Task) -> Sequence[Message]:
        """Reset an environment and close it. An error of its `close` is a further problem."""
        try:
            return await asyncio.wait_for(
                leave_when_cancelled(reset_environment(environment, task)), RESET_TIMEOUT_S
            )
        except TimeoutError:
            raise ConfigError(
                f"{type(environment).__name__}.reset returned nothing within {RESET_TIMEOUT_S:g} s"
            ) from None
        finally:
            with self.report.section(f"stages.{self.stage.name}"):
                await close_environment(environment)

    def _judge(
        self, environment: Environment, task: Task, sections: Sequence[Section], key: str
    ) -> None:
        """Judge the task's demonstration with the rewards that call no model.

        Without a demonstration, `MADE_UP_ANSWER` is judged.

        key: The recipe's key of these rewards, for messages.
        """
        if self.stage.agent is not None:
            return  # the rewards may read results that only an agent's attempt has
        local_sections = [section for section in sections if not _calls_model(section)]
        reward = build_reward(local_sections)
        if reward is None:
            return
        try:
            answer, is_made_up = tuple(environment.demonstration(task)), False
        except (DataError, NotImplementedError, AttributeError):
            answer, is_made_up = (Message("assistant", MADE_UP_ANSWER),), True
        trajectory = self._make_trajectory(task, answer)
        outcome = run_event_loop(_score(reward, trajectory, task))
        names = ", ".join(section.kind_name for section in local_sections)
        if isinstance(outcome, Failed):
            message = describe_user_error(outcome.detail)
            if not is_made_up:
                raise ConfigError(f"{key}: {names} fails on a demonstration: {message}")
            self.report.warnings.append(
                f"{self.stage.name}: {key}: {names} fails on the answer {MADE_UP_ANSWER!r}: "
                f"{message}. A failed attempt trains nothing; return 0 for a wrong answer"
            )
            return
        answer_text = f"the answer {MADE_UP_ANSWER!r}" if is_made_up else "a demonstration"
        self.report.opened.append(
            f"{self.stage.name}: {key}: {names} gives {answer_text} {outcome.reward}"
        )

    def _make_trajectory(self, task: Task, answer: Sequence[Message]) -> Trajectory:
        if self.renderer is None:
            return replace(
                Trajectory.supervised([], [], messages=(*task.messages, *answer)), outcome=None
            )
        return TextRenderer(self.renderer, max_context=sys.maxsize).row(task, answer)


async def _score(reward: Reward, trajectory: Trajectory, task: Task) -> Outcome:
    try:
        (outcome,) = await asyncio.wait_for(
            leave_when_cancelled(run_guarded(lambda: reward.score([trajectory], task))),
            JUDGE_TIMEOUT_S,
        )
    except TimeoutError:
        raise ConfigError(
            f"{type(reward).__name__}.score returned nothing within {JUDGE_TIMEOUT_S:g} s"
        ) from None
    return outcome


def _calls_model(section: object) -> bool:
    """True if a reward's section, or a section inside it, calls a service or loads a model."""
    if isinstance(section, Section):
        return section.calls_model or any(_calls_model(value) for value in dict(section).values())
    if isinstance(section, dict):
        return any(_calls_model(value) for value in section.values())
    return isinstance(section, tuple) and any(_calls_model(item) for item in section)


def _describe(error: BaseException) -> str:
    if isinstance(error, RatchetError):
        return str(error)
    if isinstance(error, UserCodeFailed):
        return describe_user_error(str(error))
    return describe_user_error("".join(traceback.format_exception(error)))
