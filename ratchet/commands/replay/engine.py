"""The replay engine: computes steps of a finished run again with the ordinary training loop.

The groups come from the run's record. The weights come from the nearest earlier checkpoint, or from
the recipe if there is none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
from torch import Tensor

from ratchet.algorithms.base import AlgoState
from ratchet.batch import Batch
from ratchet.config.base import Section
from ratchet.config.loader import load_config
from ratchet.config.resolve import build
from ratchet.config.schema import RunConfig
from ratchet.data.formats.media import embedded
from ratchet.data.processor import Processor
from ratchet.errors import ConfigError, DataError, RunDirectoryError
from ratchet.executors.freeze import prepare_process
from ratchet.experience.sources.batcher import Batcher
from ratchet.learners.config import DistributedConfig
from ratchet.observe.records.reader import Record
from ratchet.observe.records.table import build_table
from ratchet.protocols import Fingerprinted, Learner
from ratchet.runs.checkpoints import Checkpoint, CheckpointStore
from ratchet.runs.run_dir import RunDirectory
from ratchet.training.from_config import (
    build_adapter,
    build_policy,
    build_stage_spec,
    resolve_resume_config,
)
from ratchet.training.loop import train
from ratchet.training.roles import make_roles
from ratchet.training.run import StageRun
from ratchet.training.stage import Policy
from ratchet.types import Group, Medium, Placed


class Recorded:
    """A `Source` that returns the recorded groups of a step."""

    def __init__(self, record: Record, processor: Processor | None) -> None:
        self.record, self.processor = record, processor

    async def draw(self, n: int, version: int) -> list[Group]:
        """Return the groups of step `version` + 1; the record sets their number, not `n`."""
        return [self._restore_media(group) for group in self.record.groups(version + 1)]

    def _restore_media(self, group: Group) -> Group:
        """Return the group with the model inputs of its media, which the record does not hold."""
        rows = tuple(
            replace(
                row,
                media=tuple(
                    Placed(start, self._process_medium(medium)) for start, medium in row.media
                ),
            )
            for row in group.trajectories
        )
        return replace(group, trajectories=rows)

    def _process_medium(self, medium: Medium) -> Medium:
        """Process a recorded medium again.

        Raises DataError if the model has no processor, or another one than when it was recorded.
        """
        where = f"the record's {medium.kind} {medium.key}"
        if self.processor is None:
            raise DataError(
                f"{where} can't be read: the model of the run has no processor for it any more"
            )
        expanded = self.processor.expanded(embedded(medium.kind, medium.source), where=where).medium
        if expanded.key != medium.key:
            raise DataError(
                f"{where} is prepared otherwise than it was: the model has another processor, and "
                "nothing would be equal"
            )
        return expanded

    def ack(self, ids: Sequence[str], step: int) -> None: ...

    def nack(self, ids: Sequence[str], reason: str) -> None: ...

    async def snapshot(self) -> Mapping[str, Any]:
        return {}

    async def restore(self, state: Mapping[str, Any]) -> None: ...


class NoGenerator(Section):
    """A generator section that builds no generator, because a replay generates nothing."""

    builds: ClassVar[str] = "ratchet.commands.replay.engine:no_generator"


def no_generator(*_: object) -> None:
    """Build nothing: the generator of a replay is None."""


class NoWeightSync:
    """A `WeightSync` that sends nothing, because a replay has no generator."""

    async def push(self, version: int) -> None: ...

    async def close(self) -> None: ...


@dataclass(frozen=True)
class Played:
    """A replayed step and its results."""

    step: int
    stage: str
    groups: Sequence[Group]  # that the step trained on
    batch: Batch  # that the step trained on
    weights_T: Tensor  # as the recorder gets them
    metrics: Mapping[str, float | None]  # as a run writes them to metrics.jsonl
    fingerprints: Mapping[str, str]  # of the weights after the step, by role

    @property
    def table(self) -> pa.Table:
        """The step's rows, in the table that the recorder would write."""
        return build_table(self.step, self.stage, self.groups, self.batch, self.weights_T.numpy())


class Witness:
    """A stand-in for a run's recorder and sinks that keeps the reports of one step in memory."""

    def __init__(self) -> None:
        self._step: dict[str, Any] = {}
        self._metrics: Mapping[str, float | None] = {}

    def add(
        self,
        step: int,
        stage: str,
        groups: Sequence[Group],
        batch: Batch,
        weights: Any,
        roles: Mapping[str, Learner],
    ) -> None:
        fingerprints = {
            name: role.fingerprint()
            for name, role in roles.items()
            if isinstance(role, Fingerprinted)
        }
        self._step = {
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
    def played(self) -> Played:
        """The step that was reported."""
        return Played(metrics=self._metrics, **self._step)


class Replay:
    """A replay of a finished run.

    `before(step)` computes the weights that the step starts from, and `play` computes the step.

    Raises RunDirectoryError if the path holds no run, DataError if a step that is needed is missing
    in the record or was changed there, CheckpointError for a damaged checkpoint, and ConfigError
    for a run that one process can't replay.
    """

    def __init__(self, path: Path) -> None:
        self.directory = RunDirectory(path)
        if not self.directory.used:
            raise RunDirectoryError(
                f"{path} holds no run (no config.yaml): give the directory that `ratchet train` "
                "named"
            )
        self.config = load_config(self.directory.config)
        self.record = Record(self.directory.steps)
        self.store = CheckpointStore(self.directory.checkpoints)
        # The step of the checkpoint that the replay started from; 0 without a checkpoint.
        self.begun_at = 0
        # The first step since then whose weights differ from the recorded fingerprints.
        self.diverged: int | None = None
        # The stage, and the last step that is computed; -1 before the replay starts.
        self.index = self.done = -1
        self.run: StageRun | None = None
        self.policy: Policy | None = None
        prepare_process(self.config.threads)

    async def before(self, step: int) -> StageRun:
        """Compute all steps before `step` and return the run in that state.

        The replay goes on from its present state if that is no earlier than the nearest checkpoint.
        """
        nearest_checkpoint = max((saved for saved in self.store.steps() if saved < step), default=0)
        start = (
            self.done
            if self.run is not None and nearest_checkpoint <= self.done < step
            else nearest_checkpoint
        )
        self._require_recorded(step, range(start + 1, step + 1))
        if self.run is None or start != self.done:
            self._start_from(nearest_checkpoint)
        while self.done < step - 1:
            await self.play()
        return self._next_stage_run()

    async def play(self) -> Played:
        """Compute the next step, and note if its weights differ from the recorded ones."""
        run = self._next_stage_run()
        run.recorder = witness = Witness()
        run.observers = (witness.observe,)
        run.first_step, run.last_step = self.done, self.done + 1
        await train(run)
        self.done += 1
        played = witness.played
        recorded = self.record.steps[played.step].fingerprints
        if self.diverged is None and any(
            played.fingerprints.get(role) != fingerprint for role, fingerprint in recorded.items()
        ):
            self.diverged = played.step
        return played

    async def play_changed(self, config: RunConfig, states: Path) -> Played:
        """Compute the next step with another recipe, on separate learners.

        The run itself does not advance. `states` is a directory for copying the present state of
        its learners. Raises ConfigError if the other recipe has a role that the run lacks.
        """
        run = self._next_stage_run()
        policy = build_policy(
            self._without_generator(resolve_resume_config(config, self.index, self.directory.path))
        )
        changed_run = self._stage_run(config, policy)
        missing_roles = sorted(set(changed_run.roles) - set(run.roles))
        if missing_roles:
            raise ConfigError(
                f"the recipe that is to be compared has the role '{missing_roles[0]}', whose "
                "weights the run never had"
            )
        for name, learner in changed_run.roles.items():
            run.roles[name].save(states / name)
            learner.load(states / name)
        changed_run.state = deepcopy(run.state)
        changed_run.recorder = witness = Witness()
        changed_run.observers = (witness.observe,)
        changed_run.first_step, changed_run.last_step = self.done, self.done + 1
        await train(changed_run)
        return witness.played

    # --- starting point and stages

    def _start_from(self, saved: int) -> None:
        """Build the run at the checkpoint of step `saved`, or at the recipe's start for 0."""
        checkpoint = self.store.load(saved) if saved else None
        # A checkpoint has a summary of each stage that was finished by then.
        self.index = 0 if checkpoint is None else len(checkpoint.meta["summaries"])
        self._refuse_distributed(self.index)
        config = (
            self.config
            if checkpoint is None
            else resolve_resume_config(self.config, self.index, self.directory.path)
        )
        self.policy = build_policy(self._without_generator(config))
        self.run = self._stage_run(self.config, self.policy)
        self.begun_at = self.done = saved
        self.diverged = None
        if checkpoint is not None:
            self._load_checkpoint(self.run, checkpoint)

    def _load_checkpoint(self, run: StageRun, checkpoint: Checkpoint) -> None:
        for role, learner in run.roles.items():
            learner.load(checkpoint.path / role)
        run.state = AlgoState(**checkpoint.meta["state"])

    def _next_stage_run(self) -> StageRun:
        """Return the run of the stage that the next step belongs to.

        A new stage starts from the model that the previous one trained.
        """
        assert self.run is not None, "`before` comes first"
        assert self.policy is not None
        if self.done == self._end(self.index):
            self.index += 1
            self._refuse_distributed(self.index)
            self.run = self._stage_run(self.config, self.policy)
        return self.run

    def _end(self, index: int) -> int:
        """Return the last step of stage `index`."""
        return sum(stage.steps for stage in self.config.stages[: index + 1])

    def _stage_run(self, config: RunConfig, policy: Policy) -> StageRun:
        """Return a run of the current stage that trains on recorded groups."""
        stage = config.stages[self.index]
        spec = build_stage_spec(config, self.index)
        algorithm = build(stage.algorithm)
        roles = make_roles(
            policy.model,
            policy.tokenizer,
            algorithm,
            section=spec.learner,
            optimizer=spec.optimizer,
            steps=spec.steps,
            spec=spec.algorithm,
            adapter=build_adapter(config, self.index, self.directory.path),
        )
        # Failed attempts must not stop a replay, because they did not stop the run.
        batcher = Batcher(
            Recorded(self.record, policy.renderer.processor),
            groups_per_step=spec.batch_size,
            max_failed_share=1.0,
        )
        first_step = spec.first_step or 0
        return StageRun(
            spec.name,
            algorithm,
            roles,
            batcher,
            NoWeightSync(),
            first_step=first_step,
            last_step=first_step + spec.steps,
        )

    @staticmethod
    def _without_generator(config: RunConfig) -> RunConfig:
        """Return the recipe without generators, so that none is started."""
        stages = tuple(
            stage.model_copy(update={"generator": NoGenerator()}) for stage in config.stages
        )
        return config.model_copy(update={"stages": stages})

    # --- refusals

    def _refuse_distributed(self, index: int) -> None:
        """Raise ConfigError if the stage's learner was distributed over processes."""
        stage = self.config.stages[index]
        if isinstance(stage.learner, DistributedConfig):
            kind = getattr(stage.learner, "kind", "")
            raise ConfigError(
                f"stage {stage.name} trained with learner.kind={kind}, whose processes each sum a "
                "part of a gradient: one "
                "process sums in another order, so nothing would be bit-equal. The record can be "
                "looked at (docs/records.md)"
            )

    def _require_recorded(self, step: int, needed: range) -> None:
        """Raise DataError if the record lacks a needed step, or has only some of its groups."""
        last = self._end(len(self.config.stages) - 1)
        if not 1 <= step <= last:
            raise DataError(f"the run has steps 1 to {last}: there is no step {step}")
        facts = self.record.steps
        missing = [
            needed_step
            for needed_step in needed
            if needed_step not in facts or not facts[needed_step].whole
        ]
        if step in missing:
            raise DataError(f"step {step} can't be played again: {self._why_missing(step)}")
        if missing:
            start = (
                f"the checkpoint of step {needed[0] - 1}"
                if needed[0] > 1
                else "the start of the run"
            )
            raise DataError(
                f"step {step} can't be played again: it needs all steps since {start}, and of step "
                f"{missing[0]} "
                f"{self._why_missing(missing[0])}. More checkpoints (checkpoint.every, keep) need "
                "fewer steps"
            )

    def _why_missing(self, step: int) -> str:
        """Return the reason, for an error message, why the record lacks groups of a step."""
        facts, settings = self.record.steps, self.config.record
        if step in facts:
            return (
                f"the record has a sample, {facts[step].groups} of {facts[step].drawn} groups "
                "(record.groups)"
            )
        if settings.every == 0:
            return "nothing was recorded (record.every=0)"
        if settings.every > 1 and step % settings.every:
            return f"nothing was recorded (record.every={settings.every})"
        if facts and step < min(facts):
            return (
                f"the record is gone: it holds {settings.max_gib:g} GiB (record.max_gib), of "
                "the newest steps"
            )
        return "there is no record (the run has not come so far, or its record ended: see run.log)"


def changed_config(replay: Replay, changes: Sequence[str]) -> RunConfig:
    """Return the run's recipe with changed keys, such as "algorithm.loss.clip_high=0.3".

    A key must be in one of the sections CHANGEABLE. The part's name may be left out if only one
    part of the algorithm has the key ("algorithm.clip_high=0.3"). Raises ConfigError for keys of
    other sections, because they would change the groups.
    """
    stage = replay.config.stages[replay.index]
    return load_config(replay.directory.config, [_qualify_key(text, stage) for text in changes])


# The sections of a stage that act on recorded groups and can't change them.
CHANGEABLE = ("algorithm", "optimizer", "learner")


def _qualify_key(text: str, stage: Any) -> str:
    """Return a setting with its full key: the stage's name, and the part of the algorithm."""
    path, equals, value = text.partition("=")
    keys = path.strip().split(".")
    if keys[:2] == ["stages", stage.name]:
        keys = keys[2:]
    if keys[0] not in CHANGEABLE:
        raise ConfigError(
            f"--set {text}: the groups are as they were recorded, so only {', '.join(CHANGEABLE)} "
            "of its stage can change"
        )
    if (
        keys[0] == "algorithm"
        and len(keys) == 2
        and keys[1] not in type(stage.algorithm).model_fields
    ):
        parts = {
            name: getattr(stage.algorithm, name) for name in type(stage.algorithm).model_fields
        }
        owners = [
            name
            for name, part in parts.items()
            if keys[1] in getattr(type(part), "model_fields", ())
        ]
        keys = ["algorithm", *owners, keys[1]] if len(owners) == 1 else keys
    return f"stages.{stage.name}.{'.'.join(keys)}{equals}{value}"
