"""The replay engine: computes steps of a finished run again with the ordinary training loop.

The groups come from the run's record. The weights come from the nearest earlier checkpoint, or from
the recipe if there is none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
from torch import Tensor

from ratchet.algorithms.base import AlgoState
from ratchet.batch import Batch
from ratchet.commands.replay.no_generator import NoGeneratorConfig, NoWeightSync
from ratchet.config.base import Section
from ratchet.config.loader import dump_config, load_config
from ratchet.config.resolve import build
from ratchet.config.schema import RunConfig
from ratchet.data.formats.media import embed_bytes
from ratchet.data.processor import Processor
from ratchet.errors import ConfigError, DataError, RunNotFound
from ratchet.executors.freeze import prepare_process
from ratchet.experience.sources.batcher import Batcher
from ratchet.learners.config import DistributedConfig
from ratchet.observe.records.reader import Record
from ratchet.observe.records.table import build_table
from ratchet.protocols import Learner, Source
from ratchet.runs.checkpoints import CheckpointStore
from ratchet.runs.recipe_changes import restore_earlier_config
from ratchet.runs.run_dir import RunDirectory
from ratchet.training.from_config import build_policy, resolve_resume_config
from ratchet.training.loop import train
from ratchet.training.roles import make_roles
from ratchet.training.run import StageRun
from ratchet.training.saved_weights import (
    describe_changed_start,
    explain_relative_path,
    load_start_state,
    use_start_copy,
)
from ratchet.training.stage import Policy
from ratchet.training.stage_from_config import build_adapter, build_stage_spec
from ratchet.types import Group, Medium, PlacedMedium
from ratchet.utils.temp_dirs import TemporaryFolder


class RecordedSource(Source):
    """A `Source` that supplies the recorded groups of each step to the training loop."""

    def __init__(self, record: Record, processor: Processor | None) -> None:
        self.record, self.processor = record, processor

    async def draw(self, n: int, version: int) -> list[Group]:
        """Return all recorded groups of step `version` + 1; `n` is ignored."""
        return [self._restore_media(group) for group in self.record.groups(version + 1)]

    def _restore_media(self, group: Group) -> Group:
        """Return the group with the model inputs of its media, which are not recorded."""
        trajectories = tuple(
            replace(
                row,
                media=tuple(
                    PlacedMedium(start, self._process_medium(medium)) for start, medium in row.media
                ),
            )
            for row in group.trajectories
        )
        return replace(group, trajectories=trajectories)

    def _process_medium(self, medium: Medium) -> Medium:
        """Process a recorded medium again.

        Raises DataError if the model's processor is missing, or has changed since the run.
        """
        description = f"the record's {medium.kind} {medium.key}"
        if self.processor is None:
            raise DataError(
                f"{description} can't be read: the run's model has no processor any more"
            )
        expanded = self.processor.expand(
            embed_bytes(medium.kind, medium.source), where=description
        ).medium
        if expanded.key != medium.key:
            raise DataError(
                f"{description} is not processed as in the run: the model has another processor, "
                "so no step would be equal"
            )
        return expanded

    def ack(self, ids: Sequence[str], step: int) -> None: ...

    def nack(self, ids: Sequence[str], reason: str) -> None: ...

    async def snapshot(self) -> Mapping[str, Any]:
        return {}

    async def restore(self, state: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True)
class ReplayedStep:
    """A replayed step and its results."""

    step: int
    stage: str
    groups: Sequence[Group]  # the groups that the step trained on
    batch: Batch  # these groups, packed
    weights_T: Tensor  # weight of each of the batch's T tokens in the policy loss
    metrics: Mapping[str, float | None]  # in the form that a run writes to metrics.jsonl
    fingerprints: Mapping[str, str]  # fingerprints of the weights after the step, by role

    @property
    def table(self) -> pa.Table:
        """The step's rows, in the table that the recorder would write."""
        return build_table(self.step, self.stage, self.groups, self.batch, self.weights_T.numpy())


class StepCollector:
    """A replacement of a run's recorder and sinks that keeps the results of one step in memory."""

    def __init__(self) -> None:
        self._step_fields: dict[str, Any] = {}
        self._metrics: Mapping[str, float | None] = {}

    def add(
        self,
        step: int,
        stage: str,
        groups: Sequence[Group],
        batch: Batch,
        weights: Callable[[Batch], Tensor],
        roles: Mapping[str, Learner],
    ) -> None:
        fingerprints = {
            name: fingerprint
            for name, role in roles.items()
            if (fingerprint := role.fingerprint()) is not None
        }
        self._step_fields = {
            "step": step,
            "stage": stage,
            "groups": groups,
            "batch": batch,
            "fingerprints": fingerprints,
            "weights_T": weights(batch),
        }

    def flush(self) -> None: ...

    def observe(self, step: int, metrics: Mapping[str, float | None]) -> None:
        self._metrics = metrics

    @property
    def replayed_step(self) -> ReplayedStep:
        """Return the step that was added last."""
        return ReplayedStep(metrics=self._metrics, **self._step_fields)


class Replay:
    """A replay of a finished run.

    `advance_to(step)` computes the weights that the step starts from, and `replay_next` computes
    the step.

    Raises RunDirectoryError if the path holds no run, DataError if the record lacks a needed step
    or was changed, CheckpointError for a damaged checkpoint, and ConfigError for a run that one
    process can't replay.
    """

    def __init__(self, path: Path) -> None:
        self.directory = RunDirectory(path)
        if not self.directory.is_used:
            raise RunNotFound(
                f"{path} holds no run (no config.yaml): give the directory that `ratchet train` "
                "printed"
            )
        self._newest_config = use_start_copy(load_config(self.directory.config), path)
        # The recipe in force at the next step. It differs from `_newest_config` if the run was
        # resumed with changes after that step.
        self.config = self._get_config_after(0)
        self.record = Record(self.directory.steps)
        self.store = CheckpointStore(self.directory.checkpoints)
        # The step of the checkpoint that the replay started from; 0 without a checkpoint.
        self.start_step = 0
        # The first step since `start_step` whose weights differ from the recorded fingerprints.
        self.diverged_step: int | None = None
        # Says that `model.path` holds other weights than the run started from; None if it does not,
        # or if the replay started from a checkpoint.
        self.changed_start: str | None = None
        # Index of the stage, and the last computed step; both are -1 before the replay starts.
        self.stage_index = self.last_step = -1
        self.run: StageRun | None = None
        self.policy: Policy | None = None
        prepare_process(self.config.threads)

    async def advance_to(self, step: int) -> StageRun:
        """Compute all steps before `step` and return the run in that state.

        The replay continues from its present state, or from a checkpoint that is nearer.
        """
        earlier_checkpoints = [saved for saved in self.store.steps() if saved < step]
        nearest_checkpoint = max(earlier_checkpoints, default=0)
        start = (
            self.last_step
            if self.run is not None and nearest_checkpoint <= self.last_step < step
            else nearest_checkpoint
        )
        self._require_recorded(step, range(start + 1, step + 1))
        if self.run is None or start != self.last_step:
            self._start_from(nearest_checkpoint)
        while self.last_step < step - 1:
            await self.replay_next()
        return self._enter_next_stage()

    async def replay_next(self, roles: Mapping[str, Learner] | None = None) -> ReplayedStep:
        """Compute the next step, and set `diverged_step` if its weights are the first to differ.

        `roles` has wrappers of the run's learners, by role, that compute the step in their place.
        """
        run = self._enter_next_stage()
        replayed = await self._train_next(replace(run, roles={**run.roles, **(roles or {})}))
        self.last_step += 1
        recorded = self.record.steps[replayed.step].fingerprints
        if self.diverged_step is None and any(
            replayed.fingerprints.get(role) != fingerprint for role, fingerprint in recorded.items()
        ):
            self.diverged_step = replayed.step
        return replayed

    async def replay_changed(self, config: RunConfig, directory: Path) -> ReplayedStep:
        """Compute the next step with another recipe, on separate learners.

        The run itself does not advance. The state of its learners is copied through `directory`.
        Raises ConfigError if the other recipe has a role that the run lacks.
        """
        run = self._enter_next_stage()
        policy = self._build_policy(config)
        changed_run = self._make_stage_run(config, policy, deepcopy(run.state))
        missing_roles = sorted(set(changed_run.roles) - set(run.roles))
        if missing_roles:
            raise ConfigError(
                f"the changed recipe needs the role '{missing_roles[0]}', of which the run has no "
                "weights: choose an algorithm without this role"
            )
        for name, learner in changed_run.roles.items():
            run.roles[name].save(directory / name)
            learner.load(directory / name)
        return await self._train_next(changed_run)

    async def _train_next(self, run: StageRun) -> ReplayedStep:
        """Compute only the next step, with the algorithm and roles of `run`; return its results."""
        collector = StepCollector()
        steps = {"first_step": self.last_step, "end_step": self.last_step + 1}
        await train(replace(run, recorder=collector, observers=(collector.observe,), **steps))
        return collector.replayed_step

    # --- starting point and stages

    def _start_from(self, step: int) -> None:
        """Build the run at the checkpoint of this step; 0 is the start of the run."""
        checkpoint = self.store.load(step) if step else None
        self.config = self._get_config_after(step)
        # A checkpoint has a summary of each stage that was finished by then.
        self.stage_index = 0 if checkpoint is None else len(checkpoint.meta["summaries"])
        self._require_local_learner(self.stage_index)
        config = (
            self.config
            if checkpoint is None
            else resolve_resume_config(self.config, self.stage_index, self.directory.path)
        )
        with explain_relative_path(config, self.directory.path):
            self.policy = build_policy(self._without_generator(config))
        state = None if checkpoint is None else AlgoState(**checkpoint.meta["state"])
        self.run = self._make_stage_run(self.config, self.policy, state)
        self.start_step = self.last_step = step
        self.diverged_step = None
        self.changed_start = None
        if checkpoint is None:
            model = self.policy.model
            self.changed_start = describe_changed_start(config, self.directory, model)
            load_start_state(self.run, self.directory.path)
        else:
            for role, learner in self.run.roles.items():
                learner.load(checkpoint.path / role)

    def _enter_next_stage(self) -> StageRun:
        """Enter the stage that the next step belongs to, and return its run.

        A new stage starts from the model that the previous stage trained.
        """
        assert self.run is not None, "`advance_to` must be called first"
        assert self.policy is not None
        self._apply_recipe_changes()
        if self.last_step == self._get_end_step(self.stage_index):
            self.stage_index += 1
            self._require_local_learner(self.stage_index)
            self.run = self._make_stage_run(self.config, self.policy)
        return self.run

    def _get_config_after(self, step: int) -> RunConfig:
        """Return the recipe that the run had for the step after `step`."""
        return restore_earlier_config(self._newest_config, self.directory.provenance, step)

    def _apply_recipe_changes(self) -> None:
        """Apply the changes of the run's recipe that begin at the next step.

        As in a resumed run, the policy and the roles are built again and load their current state.
        """
        config = self._get_config_after(self.last_step)
        if config == self.config:
            return
        assert self.run is not None, "`advance_to` must be called first"
        earlier_run, self.config = self.run, config
        if self.last_step < self._get_end_step(self.stage_index):
            self.policy = self._build_policy(config)
            self.run = self._make_stage_run(config, self.policy, deepcopy(earlier_run.state))
            with TemporaryFolder("replay") as states:
                for name, learner in earlier_run.roles.items():
                    learner.save(states / name)
                    self.run.roles[name].load(states / name)

    def _get_end_step(self, index: int) -> int:
        """Return the number of steps that the run has done by the end of stage `index`."""
        return sum(stage.n_steps for stage in self.config.stages[: index + 1])

    def _make_stage_run(
        self, config: RunConfig, policy: Policy, state: AlgoState | None = None
    ) -> StageRun:
        """Return a run of the current stage that trains on recorded groups."""
        stage = config.stages[self.stage_index]
        spec = build_stage_spec(config, self.stage_index)
        algorithm = build(stage.algorithm)
        roles = make_roles(
            policy.model,
            policy.tokenizer,
            algorithm,
            section=spec.learner,
            optimizer=spec.optimizer,
            steps=spec.steps,
            algorithm_section=spec.algorithm,
            adapter=build_adapter(config, self.stage_index, self.directory.path),
        )
        # Failed attempts did not stop the run, so they must not stop its replay.
        batcher = Batcher(
            RecordedSource(self.record, policy.renderer.processor),
            groups_per_step=spec.batch_size,
            max_failed_share=1.0,
        )
        start = spec.start_step or 0
        return StageRun(
            spec.name,
            algorithm,
            roles,
            batcher,
            NoWeightSync(),
            start_step=start,
            first_step=start,
            end_step=start + spec.steps,
            state=state or AlgoState(),
        )

    def _build_policy(self, config: RunConfig) -> Policy:
        """Return a policy into which checkpoints of the current stage can be loaded."""
        return build_policy(
            self._without_generator(
                resolve_resume_config(config, self.stage_index, self.directory.path)
            )
        )

    @staticmethod
    def _without_generator(config: RunConfig) -> RunConfig:
        """Return the recipe without generators, so that none is started."""
        stages = tuple(
            stage.model_copy(update={"generator": NoGeneratorConfig()}) for stage in config.stages
        )
        return config.model_copy(update={"stages": stages})

    # --- refusals

    def _require_local_learner(self, index: int) -> None:
        """Raise ConfigError if the stage's learner was distributed over processes."""
        stage = self.config.stages[index]
        if isinstance(stage.learner, DistributedConfig):
            kind = stage.learner.kind_name
            raise ConfigError(
                f"stage {stage.name} trained with learner.kind={kind}, whose ranks each sum a part "
                "of a gradient: one process sums in another order, so no step would be bit-equal. "
                "Read the record instead (docs/records.md)"
            )

    def _require_recorded(self, step: int, needed_steps: range) -> None:
        """Raise DataError if the record lacks a needed step, or has only some of its groups."""
        final_step = sum(stage.n_steps for stage in self._newest_config.stages)
        if not 1 <= step <= final_step:
            raise DataError(f"the run has steps 1 to {final_step}: there is no step {step}")
        recorded_steps = self.record.steps
        missing_steps = [
            needed_step
            for needed_step in needed_steps
            if needed_step not in recorded_steps or not recorded_steps[needed_step].is_complete
        ]
        if step in missing_steps:
            raise DataError(f"step {step} can't be replayed: {self._explain_missing(step)}")
        if missing_steps:
            start = (
                f"the checkpoint of step {needed_steps[0] - 1}"
                if needed_steps[0] > 1
                else "the start of the run"
            )
            raise DataError(
                f"step {step} can't be replayed: it needs all steps since {start}, but of step "
                f"{missing_steps[0]} {self._explain_missing(missing_steps[0])}. With more "
                "checkpoints (checkpoint.every, keep) a replay needs fewer steps"
            )

    def _explain_missing(self, step: int) -> str:
        """Return the reason, for an error message, why the record lacks groups of a step."""
        recorded_steps, settings = self.record.steps, self.config.record
        if step in recorded_steps:
            return (
                f"the record has only {recorded_steps[step].groups} of "
                f"{recorded_steps[step].drawn} groups (record.groups)"
            )
        if settings.every == 0:
            return "nothing was recorded (record.every=0)"
        if settings.every > 1 and step % settings.every:
            return f"nothing was recorded (record.every={settings.every})"
        if recorded_steps and step < min(recorded_steps):
            return (
                f"the record was removed: only the newest {settings.max_gib:g} GiB are kept "
                "(record.max_gib)"
            )
        return (
            "there is no record (the run has not reached the step, or stopped recording: see "
            "run.log)"
        )


def load_changed_config(replay: Replay, changes: Sequence[str]) -> RunConfig:
    """Return the run's recipe with changed keys, such as "algorithm.loss.clip_high=0.3".

    A key must be in one of the sections CHANGEABLE_SECTIONS. The name of an inner section of the
    algorithm may be omitted if only that section has the key ("algorithm.clip_high=0.3"). Raises
    ConfigError for keys of other sections, because they would change the groups.
    """
    stage = replay.config.stages[replay.stage_index]
    overrides = [_qualify_key(text, stage) for text in changes]
    if replay.config == load_config(replay.directory.config):
        return load_config(replay.directory.config, overrides)
    with TemporaryFolder("recipe") as folder:
        earlier_recipe = folder / replay.directory.config.name
        earlier_recipe.write_text(dump_config(replay.config), encoding="utf-8")
        return load_config(earlier_recipe, overrides)


# The sections of a stage that use the recorded groups but can't change them.
CHANGEABLE_SECTIONS = ("algorithm", "optimizer", "learner")


def _qualify_key(text: str, stage: Any) -> str:
    """Return a setting with its full key, completed by the stage and the inner section."""
    path, equals, setting = text.partition("=")
    keys = path.strip().split(".")
    if keys[:2] == ["stages", stage.name]:
        keys = keys[2:]
    if keys[0] not in CHANGEABLE_SECTIONS:
        raise ConfigError(
            f"--set {text}: the recorded groups can't change, so only "
            f"{', '.join(CHANGEABLE_SECTIONS)} of the stage may be set"
        )
    if (
        keys[0] == "algorithm"
        and len(keys) == 2
        and keys[1] not in type(stage.algorithm).model_fields
    ):
        values_by_key = {
            name: getattr(stage.algorithm, name) for name in type(stage.algorithm).model_fields
        }
        sections_with_key = [
            name
            for name, value in values_by_key.items()
            if isinstance(value, Section) and keys[1] in type(value).model_fields
        ]
        keys = ["algorithm", *sections_with_key, keys[1]] if len(sections_with_key) == 1 else keys
    return f"stages.{stage.name}.{'.'.join(keys)}{equals}{setting}"
