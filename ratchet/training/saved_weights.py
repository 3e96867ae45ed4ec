"""Find and export the weights that a run has saved, and start another run from them.

A run is named by its directory or address. `RUN@48` and `RUN/checkpoints/step-48` name the
checkpoint of its step 48; `RUN` alone names its finished model.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ratchet.config.loader import load_config
from ratchet.config.resolve import build, resolve
from ratchet.config.schema import ModelConfig, RunConfig, StageConfig
from ratchet.errors import (
    CheckpointNotFound,
    ConfigError,
    ModelError,
    RunDirectoryError,
    RunNotFound,
)
from ratchet.executors.freeze import freeze
from ratchet.learners.compute.token_outputs import SCALAR_COLUMNS
from ratchet.learners.config import DistributedConfig, LocalConfig, MegatronConfig
from ratchet.learners.export import export_saved
from ratchet.learners.fresh_schedule import copy_with_fresh_schedule
from ratchet.models.lora.files import fingerprint_weights, sum_bits
from ratchet.models.policy import PolicyModel
from ratchet.models.scalar_head import ScalarHead
from ratchet.observe.provenance import read_start_model
from ratchet.protocols import Learner
from ratchet.runs.checkpoints import Checkpoint, CheckpointStore
from ratchet.runs.resolve import fetch_run_model
from ratchet.runs.run_dir import AVERAGE, MODEL, START, RunDirectory
from ratchet.training.from_config import build_policy, get_adapter_base_dir, resolve_resume_config
from ratchet.training.run import StageRun
from ratchet.training.stage import Policy
from ratchet.training.stage_from_config import build_adapter
from ratchet.utils import failpoints
from ratchet.utils.object_store import expand_home, is_address

CHECKPOINT = re.compile(r"(.+)/checkpoints/step-(\d+)")
# The optimizer's state in the directory of the model that a run starts from.
OPTIMIZER = "optimizer"


@dataclass(frozen=True)
class SavedWeights:
    """Weights that a run has saved."""

    run: Path
    """The run's local directory, or the local copy of one at an address."""
    step: int | None
    """The step of the checkpoint; None for the finished model."""

    @property
    def path(self) -> Path:
        """The directory of the finished model, or of the checkpoint."""
        if self.step is None:
            return self.run / MODEL
        return RunDirectory(self.run).checkpoints / f"step-{self.step:08d}"

    def load(self) -> Checkpoint:
        """Verify the checkpoint's files, and return it.

        Raises:
            CheckpointError: The checkpoint is missing or damaged.
        """
        assert self.step is not None, "a finished model is not a checkpoint"
        return CheckpointStore(RunDirectory(self.run).checkpoints).load(self.step)


def find_saved(place: str | Path) -> SavedWeights | None:
    """Return the saved weights that a path or an address names.

    Return None if `place` names no run. Also return None for an address without a step: it is taken
    for the address of a model directory, which is checked when the model is loaded.

    Raises:
        RunDirectoryError: The place names a step, but its directory holds no run; or it names a run
            that has no finished model.
        CheckpointError: The run at the address has no such checkpoint.
    """
    text, step = split_step(str(place).rstrip("/"))
    if is_address(text) and step is None:
        return None
    path = fetch_run_model(text, step) if is_address(text) else expand_home(text)
    directory = RunDirectory(path)
    if not directory.is_used:
        if step is None:
            return None
        raise RunNotFound(
            f"{text} holds no run (no config.yaml), so it has no step {step}. Leave out the step "
            "if it is a model directory"
        )
    if step is None and not (path / MODEL).is_dir():
        steps = CheckpointStore(directory.checkpoints).steps()
        step_hint = f", or give a step of it: {path}@{steps[-1]}" if steps else ""
        raise RunDirectoryError(
            f"{path} has no finished model yet. Continue with `ratchet train --resume {path}`"
            f"{step_hint}"
        )
    if step is not None:
        _require_step(directory, step)
    return SavedWeights(path, step)


def replace_saved_model(config: RunConfig) -> RunConfig:
    """Return the recipe with a model directory as `model.path`, if `model.path` names a run.

    The directory is the run's finished model. For a checkpoint, which is not a model directory
    before it is exported, it is the model that the run started from, which has the same shape.

    Raises:
        RunDirectoryError: The run has no finished model, and no step is named.
        CheckpointError: The checkpoint is missing or damaged.
        ConfigError: `model.overrides` is set for a checkpoint.
    """
    saved = None if config.model.path is None else find_saved(config.model.path)
    if saved is None:
        return config
    if saved.step is None:
        return with_model_path(config, saved)
    check_overrides(config, saved)
    source_config = use_start_copy(load_recipe(saved.run, saved.load()), saved.run)
    changes = {"model": source_config.model, "tokenizer": source_config.tokenizer}
    return replace_saved_model(config.model_copy(update=changes))


def with_model_path(config: RunConfig, saved: SavedWeights) -> RunConfig:
    """Return the recipe with the path of a run's model or checkpoint as `model.path`."""
    model = config.model.model_copy(update={"path": str(saved.path)})
    return config.model_copy(update={"model": model})


def check_overrides(config: RunConfig, saved: SavedWeights) -> None:
    """Raise ConfigError if `model.overrides` is set for a model that is a checkpoint."""
    if saved.step is not None and config.model.overrides:
        place = f"{saved.run}@{saved.step}"
        raise ConfigError(
            f"model.overrides changes the config.json of a model directory, and {place} is a "
            f"checkpoint. Make a directory of it (`ratchet convert {place} DIR`), and set "
            "model.path=DIR"
        )


def _require_step(directory: RunDirectory, step: int) -> None:
    steps = CheckpointStore(directory.checkpoints).steps()
    if step not in steps:
        raise CheckpointNotFound(
            f"{directory.path} has no checkpoint of step {step}. There are {steps or 'none'}"
        )


def split_step(text: str) -> tuple[str, int | None]:
    """Return the run and the step that a path or address names; step None if it names none."""
    if checkpoint := CHECKPOINT.fullmatch(text):
        return checkpoint[1], int(checkpoint[2])
    run, _, number = text.rpartition("@")
    if run and number.isdecimal() and not Path(text).exists():
        return run, int(number)
    return text, None


# --- exports


def export_checkpoint(saved: SavedWeights, target: Path) -> RunConfig:
    """Write the model directory of a checkpoint's policy, as the end of a run does.

    Returns:
        The run's recipe up to the stage of the checkpoint.

    Raises:
        CheckpointError: The checkpoint is missing or damaged.
        ConfigError: Megatron wrote the checkpoint, and only Megatron can read it.
    """
    checkpoint = saved.load()
    config = load_recipe(saved.run, checkpoint)
    index = len(config.stages) - 1
    stage = config.stages[index]
    if isinstance(stage.learner, MegatronConfig):
        raise ConfigError(
            f"stage {stage.name} trained with learner.kind=megatron, whose checkpoints only "
            "Megatron can read: finish the run "
            f"(`ratchet train --resume {saved.run}`), and use its model"
        )
    resume_config = resolve_resume_config(use_start_copy(config, saved.run), index, saved.run)
    stages = tuple(
        other.model_copy(update={"generator": resolve("generator", {})})
        for other in resume_config.stages
    )
    settings = {"device": "cpu", "kernels": "auto", "precision": "auto", "stages": stages}
    policy = build_policy(freeze(resume_config.model_copy(update=settings)))
    adapter = build_adapter(config, index, saved.run)
    if adapter is not None:
        policy.model.attach(adapter)
    if isinstance(stage.learner, DistributedConfig):
        export_saved(policy.model, checkpoint.path / "policy", target)
    else:
        _export_local(stage, policy, checkpoint.path / "policy", target)
    policy.tokenizer.save(target)
    return config


def load_recipe(run: Path, checkpoint: Checkpoint) -> RunConfig:
    """Return the recipe of a run up to the stage of a checkpoint."""
    config = load_config(RunDirectory(run).config)
    n_stages = len(checkpoint.meta["summaries"]) + 1
    return config.model_copy(update={"stages": config.stages[:n_stages]})


def _export_local(stage: StageConfig, policy: Policy, saved: Path, target: Path) -> None:
    """Load the state of a local learner from `saved`, and write its model directory to `target`."""
    needs_head = SCALAR_COLUMNS & build(stage.algorithm).required_outputs("policy")
    head = ScalarHead(policy.model.hidden_size) if needs_head else None
    learner = build(LocalConfig(), policy.model, head=head)
    learner.load(saved)
    learner.export(target)


def export_models(
    config: RunConfig, run: Path, policy: Policy, learner: Learner
) -> list[tuple[str, Path]]:
    """Write the model directories of a finished run, and return their names and paths.

    The models are the last weights, and their running average if the optimizer keeps one.
    """
    models = [("model", run / MODEL)]
    learner.export(models[0][1])
    failpoints.point("finish.exported")
    if config.stages[-1].optimizer.ema_decay is not None:
        models.append(("average", run / AVERAGE))
        learner.export(models[1][1], averaged=True)
    for _, path in models:
        policy.tokenizer.save(path)
    failpoints.point("finish.tokenizer")
    return models


# --- the start of a run


def find_start(place: str, *, with_optimizer: bool) -> SavedWeights:
    """Return the saved weights that `--from` names.

    Args:
        place: The run, with a step or without.
        with_optimizer: True to start from the optimizer's state too. Only checkpoints hold it, so a
            run without a step then means its newest checkpoint.

    Raises:
        RunDirectoryError: `place` names no run.
        CheckpointError: There is no such checkpoint.
    """
    text, step = split_step(place.rstrip("/"))
    path = fetch_run_model(text, step) if is_address(text) else expand_home(text)
    if with_optimizer and step is None and RunDirectory(path).is_used:
        steps = CheckpointStore(RunDirectory(path).checkpoints).steps()
        if not steps:
            raise RunDirectoryError(
                f"{path} has no checkpoint, but --with-optimizer reads one. Leave it out"
            )
        return SavedWeights(path, steps[-1])
    saved = SavedWeights(path, step) if is_address(text) else find_saved(place)
    if saved is None or not RunDirectory(saved.run).is_used:
        raise RunNotFound(
            f"--from {place} is not a run (no config.yaml). Set model.path for a model directory"
        )
    return saved


def copy_start(saved: SavedWeights, config: RunConfig, run: Path, *, with_optimizer: bool) -> None:
    """Copy a checkpoint's weights into a new run's directory, as its start model.

    The copy is complete or absent.

    Args:
        saved: The checkpoint.
        config: The recipe of the new run.
        run: The new run's directory.
        with_optimizer: True to copy the optimizer's state too.

    Raises:
        ConfigError: The new run can't take over the optimizer's state.
    """
    target = run / START
    draft = target.with_name(f".{target.name}")
    for directory in (draft, target):
        if directory.exists():
            shutil.rmtree(directory)
    draft.parent.mkdir(parents=True, exist_ok=True)
    source = export_checkpoint(saved, draft)
    if with_optimizer:
        _check_optimizer(source.stages[-1], config.stages[0])
        copy_with_fresh_schedule(saved.path / "policy", draft / OPTIMIZER)
    draft.rename(target)


def _check_optimizer(old: StageConfig, new: StageConfig) -> None:
    """Raise ConfigError unless stage `new` can take over the optimizer's state of stage `old`."""
    for key in ("learner", "optimizer"):
        kinds = [getattr(stage, key).kind_name for stage in (old, new)]
        if kinds[0] != kinds[1]:
            raise ConfigError(
                f"--with-optimizer takes over the state of {key}.kind={kinds[0]}, but the recipe "
                f"has {kinds[1]}. Set {key}.kind={kinds[0]}, or leave out --with-optimizer"
            )
    if old.lora is not None or new.lora is not None:
        raise ConfigError(
            "--with-optimizer can't take over the state of an adapter: the new run starts from "
            "the merged weights. Leave out --with-optimizer"
        )
    if (old.optimizer.ema_decay is None) != (new.optimizer.ema_decay is None):
        decay = old.optimizer.ema_decay
        fix = "Remove optimizer.ema_decay" if decay is None else f"Set optimizer.ema_decay={decay}"
        raise ConfigError(
            "--with-optimizer takes over the running average too, but the earlier run "
            f"{'has none' if decay is None else 'has one'}. {fix}, or leave out --with-optimizer"
        )


def use_start_copy(config: RunConfig, run: Path) -> RunConfig:
    """Return the recipe with the run's own copy of its start model, if `copy_start` made one."""
    start = run / START
    if not start.is_dir():
        return config
    model_options = {
        key: getattr(config.model, key) for key in ("backend", "train_encoders", "freeze")
    }
    return config.model_copy(update={"model": ModelConfig(path=str(start), **model_options)})


def fingerprint_start(config: RunConfig, model: PolicyModel) -> str | None:
    """Return the fingerprint of the weights in `model.path`; None for a preset's random weights.

    It reads the loaded weights once from memory, and no file.

    Args:
        config: The recipe.
        model: The recipe's model, as it was loaded.
    """
    if config.model.path is None:
        return None
    return fingerprint_weights(
        {name: sum_bits(weight) for name, weight in model.canonical_weights()}
    )


def describe_changed_start(
    config: RunConfig, directory: RunDirectory, model: PolicyModel
) -> str | None:
    """Return a clause that says that the model's weights are not those that the run started from.

    Return None if they are the same, or if `provenance.json` has no fingerprint of them.

    Args:
        config: The recipe, with the `model.path` that was read.
        directory: The run directory.
        model: The model, as it was loaded.
    """
    recorded = read_start_model(directory.provenance)
    fingerprint = None if recorded is None else fingerprint_start(config, model)
    if recorded is None or fingerprint is None or recorded == fingerprint:
        return None
    path = str(config.model.path)
    is_relative = Path(path).is_dir() and not Path(path).is_absolute()
    place = f", read from the working directory {Path.cwd()}," if is_relative else ""
    return (
        f"model.path={path}{place} holds other weights than the run started from (fingerprint "
        f"{fingerprint[:12]}, recorded {recorded[:12]})"
    )


def check_start(config: RunConfig, directory: RunDirectory, model: PolicyModel) -> str | None:
    """Return the fingerprint of the weights that a run without checkpoints starts from.

    Raises:
        ModelError: The run began before, from other weights.
    """
    change = describe_changed_start(config, directory, model)
    if change is not None:
        raise ModelError(
            f"{change}, and has no checkpoint to continue from. Restore the weights, or start a "
            "new run"
        )
    return fingerprint_start(config, model)


@contextmanager
def explain_relative_path(config: RunConfig, run: Path) -> Iterator[None]:
    """Add to a ModelError that a relative `model.path` depends on the working directory.

    Args:
        config: The recipe of a run that was started before, perhaps in another directory.
        run: The run's directory.
    """
    try:
        yield
    except ModelError as error:
        path = use_start_copy(config, run).model.path
        if path is None or is_address(path) or Path(path).is_absolute() or Path(path).exists():
            raise
        raise ModelError(
            f"{error}\nIf model.path={path} is a directory, it is relative to the working "
            "directory in which the run was started: repeat the command there, not in "
            f"{Path.cwd()}"
        ) from error


def load_start_state(run: StageRun, directory: Path) -> None:
    """Load the optimizer's state that `copy_start` copied, if any, into the first stage."""
    state = directory / START / OPTIMIZER
    if state.is_dir():
        run.roles["policy"].load(state)


def keep_base(
    config: RunConfig, index: int, directory: Path, policy: Policy, run: StageRun
) -> None:
    """Export the base model of the stage's adapter if it exists only in this run."""
    base = get_adapter_base_dir(config, index, directory)
    if config.stages[index].lora is not None and base is not None:
        run.roles["policy"].export(base, part="base")
        policy.tokenizer.save(base)
