"""Steps of a run, computed again by the loop of every run, with groups from the record, and weights
from the nearest earlier checkpoint or from the recipe."""

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
    """A `FlatConfig` of the groups that a step had."""

    def __init__(self, record: Record, processor: Processor | None) -> None:
        self.record, self.processor = record, processor

    async def draw(self, n: int, version: int) -> list[Group]:
        return [self._whole(group) for group in self.record.groups(version + 1)]

    def _whole(self, group: Group) -> Group:
        """Return the group with what the model reads of its media."""
        rows = tuple(
            replace(
                row, media=tuple(Placed(start, self._read(medium)) for start, medium in row.media)
            )
            for row in group.trajectories
        )
        return replace(group, trajectories=rows)

    def _read(self, medium: Medium) -> Medium:
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
    """A generator section for replay, which generates nothing."""

    builds: ClassVar[str] = "ratchet.commands.replay.engine:no_generator"


def no_generator(*_: object) -> None:
    return None


class NoWeightSync:
    """A `WeightSync` that sends nothing, as nothing generates."""

    async def push(self, version: int) -> None: ...

    async def close(self) -> None: ...


@dataclass(frozen=True)
class Played:
    """A replayed step. `groups` and `batch` are what it learned from, `metrics` what metrics.jsonl
    would say, `fingerprints` of the weights after it, by role."""

    step: int
    stage: str
    groups: Sequence[Group]
    batch: Batch
    weights_T: Tensor
    metrics: Mapping[str, float | None]
    fingerprints: Mapping[str, str]

    @property
    def table(self) -> pa.Table:
        """Return the table as the recorder builds it."""
        return build_table(self.step, self.stage, self.groups, self.batch, self.weights_T.numpy())


class Witness:
    """A stand-in for a run's recorder and sinks that keeps what one step reports."""

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
        prints = {
            name: role.fingerprint()
            for name, role in roles.items()
            if isinstance(role, Fingerprinted)
        }
        self._step = {
            "step": step,
            "stage": stage,
            "groups": groups,
            "batch": batch,
            "fingerprints": prints,
        }
        self._step["weights_T"] = weights(batch)

    def flush(self) -> None: ...

    def observe(self, step: int, metrics: Mapping[str, float | None]) -> None:
        self._metrics = metrics

    @property
    def played(self) -> Played:
        return Played(metrics=self._metrics, **self._step)


class Replay:
    """A finished run. `before(step)` brings its weights to where that step begins, and `play`
    computes it.

    Raises RunDirectoryError for what is no run, DataError for a record that lacks or was changed in
    a step that is needed, CheckpointError for a damaged checkpoint, ConfigError for a run that one
    process can't replay.
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
        self.begun_at = 0  # the step of the checkpoint that the state comes from; 0: of none
        # the first step since then after which the weights are not those of the record
        self.diverged: int | None = None
        self.index = self.done = -1
        self.run: StageRun | None = None
        self.policy: Policy | None = None
        prepare_process(self.config.threads)

    async def before(self, step: int) -> StageRun:
        """Return the run after all steps before this one."""
        nearest = max((saved for saved in self.store.steps() if saved < step), default=0)
        start = self.done if self.run is not None and nearest <= self.done < step else nearest
        self._require(step, range(start + 1, step + 1))
        if self.run is None or start != self.done:
            self._begin(nearest)
        while self.done < step - 1:
            await self.play()
        return self._stage_of_next()

    async def play(self) -> Played:
        """Compute the next step."""
        run = self._stage_of_next()
        run.recorder = witness = Witness()
        run.observers = (witness.observe,)
        run.first_step, run.last_step = self.done, self.done + 1
        await train(run)
        self.done += 1
        played = witness.played
        recorded = self.record.steps[played.step].fingerprints
        if self.diverged is None and any(
            played.fingerprints.get(role) != was for role, was in recorded.items()
        ):
            self.diverged = played.step
        return played

    async def play_changed(self, config: RunConfig, states: Path) -> Played:
        """Compute the next step under another recipe, on learners of its own.

        states: a directory for the present state of the run's learners. Raises ConfigError if the
        other recipe needs a model that this one has not.
        """
        run = self._stage_of_next()
        policy = build_policy(
            self._without_generator(resolve_resume_config(config, self.index, self.directory.path))
        )
        other = self._stage_run(config, policy)
        missing = sorted(set(other.roles) - set(run.roles))
        if missing:
            raise ConfigError(
                f"the recipe that is to be compared has the role '{missing[0]}', whose weights the "
                "run never had"
            )
        for name, learner in other.roles.items():
            run.roles[name].save(states / name)
            learner.load(states / name)
        other.state = deepcopy(run.state)
        other.recorder = witness = Witness()
        other.observers = (witness.observe,)
        other.first_step, other.last_step = self.done, self.done + 1
        await train(other)
        return witness.played

    # --- where it begins

    def _begin(self, saved: int) -> None:
        checkpoint = self.store.load(saved) if saved else None
        self.index = 0 if checkpoint is None else len(checkpoint.meta["summaries"])
        self._refuse_spread(self.index)
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
            self._load(self.run, checkpoint)

    def _load(self, run: StageRun, checkpoint: Checkpoint) -> None:
        for role, learner in run.roles.items():
            learner.load(checkpoint.path / role)
        run.state = AlgoState(**checkpoint.meta["state"])

    def _stage_of_next(self) -> StageRun:
        """Return the stage of the next step, starting from the model that the one before it
        left."""
        assert self.run is not None, "`before` comes first"
        assert self.policy is not None
        if self.done == self._end(self.index):
            self.index += 1
            self._refuse_spread(self.index)
            self.run = self._stage_run(self.config, self.policy)
        return self.run

    def _end(self, index: int) -> int:
        return sum(stage.steps for stage in self.config.stages[: index + 1])

    def _stage_run(self, config: RunConfig, policy: Policy) -> StageRun:
        stage, plan = config.stages[self.index], build_stage_spec(config, self.index)
        algorithm = build(stage.algorithm)
        roles = make_roles(
            policy.model,
            policy.tokenizer,
            algorithm,
            section=plan.learner,
            optimizer=plan.optimizer,
            steps=plan.steps,
            spec=plan.algorithm,
            adapter=build_adapter(config, self.index, self.directory.path),
        )
        batcher = Batcher(
            Recorded(self.record, policy.renderer.processor),
            groups_per_step=plan.batch_size,
            max_failed_share=1.0,
        )
        first = plan.first_step or 0
        return StageRun(
            plan.name,
            algorithm,
            roles,
            batcher,
            NoWeightSync(),
            first_step=first,
            last_step=first + plan.steps,
        )

    @staticmethod
    def _without_generator(config: RunConfig) -> RunConfig:
        stages = tuple(
            stage.model_copy(update={"generator": NoGenerator()}) for stage in config.stages
        )
        return config.model_copy(update={"stages": stages})

    # --- what can't be played

    def _refuse_spread(self, index: int) -> None:
        stage = self.config.stages[index]
        if isinstance(stage.learner, DistributedConfig):
            kind = getattr(stage.learner, "kind", "")
            raise ConfigError(
                f"stage {stage.name} trained with learner.kind={kind}, whose processes each sum a "
                "part of a gradient: one "
                "process sums in another order, so nothing would be bit-equal. The record can be "
                "looked at (docs/records.md)"
            )

    def _require(self, step: int, needed: range) -> None:
        """Raise DataError if a needed step is not whole in the record."""
        last = self._end(len(self.config.stages) - 1)
        if not 1 <= step <= last:
            raise DataError(f"the run has steps 1 to {last}: there is no step {step}")
        facts = self.record.steps
        missing = [at for at in needed if at not in facts or not facts[at].whole]
        if step in missing:
            raise DataError(f"step {step} can't be played again: {self._why_missing(step)}")
        if missing:
            after = (
                f"the checkpoint of step {needed[0] - 1}"
                if needed[0] > 1
                else "the start of the run"
            )
            raise DataError(
                f"step {step} can't be played again: it needs all steps since {after}, and of step "
                f"{missing[0]} "
                f"{self._why_missing(missing[0])}. More checkpoints (checkpoint.every, keep) need "
                "fewer steps"
            )

    def _why_missing(self, step: int) -> str:
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
    """Return the run's recipe with changes to what is computed from recorded groups, such as
    "algorithm.loss.clip_high=0.3".

    If only one part of the algorithm has the key, its name may be left out. Raises ConfigError for
    other keys, which would change the groups.
    """
    section = replay.config.stages[replay.index]
    return load_config(replay.directory.config, [_placed(text, section) for text in changes])


CHANGEABLE = ("algorithm", "optimizer", "learner")


def _placed(text: str, stage: Any) -> str:
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
