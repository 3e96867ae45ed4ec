"""The sections of a recipe. Defaults stand here and nowhere else.

A `RunConfig` is resolved: each of its stages is complete. A recipe as written is shorter, see
`ratchet.config.loader`.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, SerializeAsAny, model_validator

from ratchet.config.base import Section
from ratchet.config.experience import (
    CurriculumConfig,
    ParityConfig,
    RolloutsConfig,
    SamplingConfig,
    Temperature,
)
from ratchet.config.media_limits import MediaConfig
from ratchet.config.resolve import Slot, resolve
from ratchet.config.sentinels import SentinelsConfig


def _like(pattern: str, wanted: str) -> AfterValidator:
    def check(text: str) -> str:
        if re.fullmatch(pattern, text) is None:
            raise ValueError(f"{text!r} must be {wanted}")
        return text

    return AfterValidator(check)


Device = Annotated[str, _like(r"auto|cpu|cuda(:\d+)?", "auto, cpu, cuda or cuda:N")]
RunName = Annotated[
    str, _like(r"[A-Za-z0-9][\w.+-]*", "of letters, digits and _ . + -, as it names a directory")
]
StageName = Annotated[
    str, _like(r"[A-Za-z_][\w-]*", "of letters, digits, _ and -, and not begin with a digit")
]


class ModelConfig(Section):
    """The model to train: a preset with random weights, or one from a directory or the hub."""

    preset: str | None = Field(
        default=None, description="Shape of a model that starts from random weights."
    )
    path: str | None = Field(
        default=None,
        description="Directory, address (s3://bucket/model) or hub id of a model to start from.",
    )
    revision: str | None = Field(default=None, description="Branch, tag or commit on the hub.")
    backend: Literal["auto", "ratchet", "transformers"] = Field(
        default="auto",
        description="Implementation of the model: Ratchet's own decoder where it can (auto), or "
        "that of transformers.",
    )
    overrides: dict[str, Any] = Field(
        default_factory=dict, description="Fields of the preset's shape to change."
    )
    train_encoders: bool = Field(
        default=False,
        description="Train the encoders of images, audio and video too, in a model that has some.",
    )
    trust_remote_code: bool = Field(
        default=False, description="Let transformers run code that comes with the model."
    )


class RecordConfig(Section):
    """The records of each step, in steps/ (docs/records.md)."""

    every: int = Field(
        default=1, ge=0, description="Steps from one recorded step to the next; 0: no records."
    )
    groups: int | None = Field(
        default=None,
        ge=1,
        description="Groups recorded a step, drawn at random; null: all. A step is only replayed "
        "from all.",
    )
    max_gib: float = Field(
        default=8.0, gt=0, description="Size of the record, above which its oldest files go."
    )


class LoggingConfig(Section):
    tensorboard: bool = Field(default=True, description="Write tensorboard/ beside metrics.jsonl.")
    sinks: Annotated[tuple[SerializeAsAny[Section], ...], Slot("sink", many=True)] = Field(
        default=(), description="Experiment trackers that get each step's metrics too."
    )
    progress: Literal["auto", "live", "plain", "off"] = Field(
        default="auto",
        description="Progress on the terminal; auto: live where it is one, else plain lines.",
    )
    system: bool = Field(
        default=True, description="Measure processors, memory, disk and accelerators in each step."
    )
    trace: bool = Field(
        default=True,
        description="Write trace.json, which Perfetto shows: when each part of a step ran.",
    )
    stall_s: float | None = Field(
        default=600.0,
        gt=0,
        description="Seconds that a phase of a step may take before the table of waits is logged; "
        "null: any.",
    )


class OptimizerConfig(Section):
    """AdamW (arXiv:1711.05101). Steps here are optimizer steps: batches x minibatches x epochs.

    whole_matrices: True if its steps need each matrix in one process.
    needs: the package that implements it; None: PyTorch or Ratchet.
    """

    builds: ClassVar[str] = "ratchet.learners.optim.adamw:AdamW"
    whole_matrices: ClassVar[bool] = False
    needs: ClassVar[str | None] = None

    lr: float = Field(default=1e-5, gt=0, description="Peak learning rate.")
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = Field(
        default=(0.9, 0.95),
        description="Decay of the running mean and of the running square of gradients.",
    )
    eps: float = Field(default=1e-8, gt=0, description="Added to the root of the running square.")
    weight_decay: float = Field(default=0.0, ge=0, description="Decoupled, on matrices only.")
    max_grad_norm: float | None = Field(
        default=1.0, gt=0, description="Gradients are scaled down to this norm; null: never."
    )
    warmup_steps: int = Field(
        default=0, ge=0, description="Optimizer steps in which the rate rises to lr."
    )
    schedule: Literal["constant", "linear", "cosine", "wsd"] = Field(
        default="constant",
        description="The rate after the warm-up; wsd: constant, then linear over the last "
        "decay_steps.",
    )
    decay_steps: int = Field(
        default=0, ge=0, description="Optimizer steps of the decay that ends a wsd schedule."
    )
    min_lr_ratio: float = Field(
        default=0.0, ge=0, le=1, description="Rate at the end of a schedule that decays, over lr."
    )
    ema_decay: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="Share that a running average of the weights keeps of itself a step; it is "
        "left in model-ema/. null: none.",
    )


class LoRAConfig(Section):
    """A low-rank adapter (arXiv:2106.09685): W x becomes W x + scale B A x.

    Only A and B train; W is frozen.
    """

    rank: int = Field(default=16, ge=1, description="Rows of each A, columns of each B.")
    alpha: float = Field(default=32.0, gt=0, description="The scale is alpha / rank.")
    dropout: float = Field(
        default=0.0, ge=0, lt=1, description="Share of A's inputs that an update sets to 0."
    )
    target_modules: Literal["all-linear"] | Annotated[tuple[str, ...], Field(min_length=1)] = Field(
        default="all-linear",
        description="Linear maps of each layer that get an adapter: all-linear, or their names "
        "(q_proj, ...).",
    )
    init: Literal["kaiming", "gaussian"] = Field(
        default="kaiming",
        description="Initial values of A; B begins at 0, so that the first step samples from the "
        "base.",
    )
    rslora: bool = Field(
        default=False, description="The scale is alpha / sqrt(rank) (arXiv:2312.03732)."
    )
    base: Literal["nf4", "float8"] | None = Field(
        default=None,
        description="Format to which the layers' frozen matrices are quantised: nf4 (4 bits, "
        "QLoRA) or float8.",
    )

    @property
    def scale(self) -> float:
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)


Chosen = SerializeAsAny[Section]


class EvaluationConfig(Section):
    """Accuracy on held-out tasks, before and after each stage."""

    environment: Annotated[Chosen | None, Slot("environment", optional=True)] = Field(
        default=None,
        description="Environment of the held-out tasks, which its own reward judges; null: the "
        "stage's.",
    )

    every: int = Field(
        default=0,
        ge=0,
        description="Steps between evaluations; 0: only before and after the stage.",
    )
    tasks: int = Field(default=512, ge=0, description="Held-out tasks; 0: no evaluation at all.")
    samples: int = Field(
        default=0, ge=0, description="Sampled attempts a task beside the greedy one."
    )
    greedy: bool = Field(
        default=True,
        description="Play one attempt a task at temperature 0; false: only the sampled ones.",
    )
    pass_threshold: float = Field(
        default=1.0, description="Reward from which on a sampled attempt counts as passed (pass@k)."
    )
    temperature: Temperature | None = Field(
        default=None, gt=0, description="Temperature of the sampled attempts; null: as in sampling."
    )
    max_new_tokens: int | None = Field(
        default=None, ge=1, description="Tokens of one completion; null: as in sampling."
    )
    patience: int = Field(
        default=0,
        ge=0,
        description="Evaluations in a row without a better metric, after which the stage ends; 0: "
        "no early stopping.",
    )
    metric: str = Field(
        default="eval/accuracy",
        description="Metric that patience watches; with - before it, less is better: -eval/loss.",
    )
    min_gain: float = Field(
        default=0.0,
        ge=0,
        description="Gain of the metric that patience needs; one of no more than this is no "
        "better.",
    )

    @model_validator(mode="after")
    def _patience_is_read(self) -> EvaluationConfig:
        for key in ("metric", "min_gain"):
            if not self.patience and key in self.changed:
                raise ValueError(
                    f"{key} is not read with patience=0: set patience, or remove {key}"
                )
        if self.patience and not self.every:
            raise ValueError(
                f"patience={self.patience} counts evaluations between steps: set every"
            )
        if not self.greedy and not self.samples:
            raise ValueError("greedy=false and samples=0 leave no attempt: set samples")
        return self


class CheckpointConfig(Section):
    every: int = Field(
        default=50, ge=0, description="Steps between checkpoints; 0: only at the end of the stage."
    )
    keep: int = Field(default=2, ge=1, description="Newest checkpoints that are kept.")
    keep_best: int = Field(
        default=0,
        ge=0,
        description="Best checkpoints that are kept too, of those saved after a step that "
        "measured the metric.",
    )
    metric: str = Field(
        default="eval/accuracy",
        description="Metric that is highest in the best checkpoints; with - before it, lowest: "
        "-eval/loss.",
    )
    end_with: Literal["last", "best"] = Field(
        default="last",
        description="Weights that the stage leaves behind: its last, or those of its best "
        "checkpoint.",
    )
    keep_every: int = Field(
        default=0,
        ge=0,
        description="Keep checkpoints whose step is a multiple of this for good; 0: none.",
    )
    on_error: Literal["stop", "warn"] = Field(
        default="stop",
        description="Reaction to a checkpoint that can't be written (a full disk, say): the run "
        "ends, or goes on and warns.",
    )
    background: bool = Field(
        default=False,
        description="Write checkpoints beside the training, from a copy in main memory; each is "
        "whole before the next.",
    )
    limit_s: float | None = Field(
        default=None,
        gt=0,
        description="Time limit of the process, in seconds; it saves before and exits with 75. "
        "null: no limit.",
    )

    @model_validator(mode="after")
    def _reads_its_metric(self) -> CheckpointConfig:
        for key in ("metric", "end_with"):
            if not self.keep_best and key in self.changed:
                raise ValueError(
                    f"{key} is not read with keep_best=0: set keep_best, or remove {key}"
                )
        return self


def _default(slot: str, kind: str) -> Any:
    return lambda: resolve(slot, {"kind": kind})


def own_rewards(environment: object) -> tuple[Section, ...]:
    """Return the environment's default rewards; () if its steps give the rewards."""
    default = getattr(environment, "default_reward", "")
    return (
        (resolve("rewards", {"kind": default} if isinstance(default, str) else default),)
        if default
        else ()
    )


def _rewards(fields: dict[str, Any]) -> tuple[Section, ...]:
    return own_rewards(fields.get("environment"))


def _eval_rewards(fields: dict[str, Any]) -> tuple[Section, ...]:
    return _rewards(fields) or fields.get("rewards", ())


Rewards = Annotated[tuple[Chosen, ...], Slot("rewards", many=True)]


class StageConfig(Section):
    """A stage of a run: one algorithm for a number of steps.

    Every key can also stand at the top of a recipe, as the default of all stages.
    """

    name: StageName = Field(description="Name of the stage; default: the algorithm's kind.")
    algorithm: Annotated[Chosen, Slot("algorithm")] = Field(
        description="Algorithm that turns a batch into an update."
    )
    environment: Annotated[Chosen, Slot("environment")] = Field(
        description="Environment that gives tasks and demonstrations."
    )
    rewards: Rewards = Field(
        default_factory=_rewards,
        description="Rewards that judge the attempts; default: the environment's own.",
    )
    eval_rewards: Rewards = Field(
        default_factory=_eval_rewards,
        description="Rewards used in evaluation; default: the environment's own, so that shaping "
        "can't move them.",
    )
    agent: Annotated[Chosen | None, Slot("agent", optional=True)] = Field(
        default=None,
        description="Agent that plays the attempts, through an OpenAI-compatible server; null: "
        "the environment's own turns.",
    )
    steps: int = Field(default=100, ge=1, description="Batches to train on.")
    batch_size: int = Field(default=32, ge=1, description="Groups (prompts, rows or pairs) a step.")
    examples: int | None = Field(
        default=None, ge=1, description="Distinct training tasks; null: no limit."
    )
    curriculum: CurriculumConfig | None = Field(
        default=None, description="Order of the examples; null: all in turn, shuffled."
    )
    sampling: SamplingConfig = SamplingConfig()
    rollouts: RolloutsConfig = RolloutsConfig()
    optimizer: Annotated[SerializeAsAny[OptimizerConfig], Slot("optimizer")] = Field(
        default_factory=_default("optimizer", "adamw"),
        description="Optimizer that turns a gradient into a step.",
    )
    lora: LoRAConfig | None = Field(
        default=None, description="Trains an adapter of the policy; null: all its weights."
    )
    learner: Annotated[Chosen, Slot("learner")] = Field(
        default_factory=_default("learner", "local")
    )
    generator: Annotated[Chosen, Slot("generator")] = Field(
        default_factory=_default("generator", "engine")
    )
    weight_sync: Annotated[Chosen, Slot("weight_sync")] = Field(
        default_factory=_default("weight_sync", "auto"),
        description="How new weights reach the generator.",
    )
    parity: ParityConfig = ParityConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    sentinels: SentinelsConfig = SentinelsConfig()

    @property
    def source(self) -> str | None:
        """Return the kind of training data; None if a custom algorithm does not declare it.

        The kinds are "rows", "pairs", "labelled", "steps" and "rollouts".
        """
        return getattr(self.algorithm, "source", None)

    @property
    def played_by_workers(self) -> bool:
        """Return True if the generator's workers play the stage's groups."""
        return getattr(self.generator, "worker_runs", "") == "groups" and self.source in (
            "rollouts",
            None,
        )

    @property
    def sampling_generator(self) -> Any:
        """Return the section of the generator that samples, also if worker processes hold it."""
        return getattr(self.generator, "worker", self.generator)

    @property
    def attempts(self) -> int:
        """Return the number of trajectories in a group."""
        return int(getattr(self.algorithm, "group_size", 1))

    @property
    def minibatches(self) -> int:
        return int(getattr(self.algorithm, "minibatches", 1))

    @property
    def epochs(self) -> int:
        return int(getattr(self.algorithm, "epochs", 1))

    @property
    def optimizer_steps(self) -> int:
        return self.steps * self.minibatches * self.epochs


def _distinct_names(stages: tuple[StageConfig, ...]) -> tuple[StageConfig, ...]:
    if not stages:
        raise ValueError("is empty: remove it for a single stage, whose keys then stand at the top")
    names = [stage.name for stage in stages]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ValueError(f"two stages are called '{repeated[0]}': give each a name of its own")
    return stages


class RunConfig(Section):
    """The resolved config of a whole run."""

    name: RunName = Field(
        default="run", description="Name of the run; default: the recipe's file name."
    )
    seed: int = Field(default=0, ge=0, lt=2**63, description="Seed of everything random.")
    device: Device = Field(default="auto", description="auto: cuda where there is one, else cpu.")
    threads: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        default="auto", description="CPU threads, which workers share."
    )
    kernels: Literal["auto", "compiled", "torch"] = Field(
        default="auto",
        description="Kernels of a float32 model on a CPU beside its large products: C that this "
        "machine's compiler has compiled, or PyTorch's operations. auto: compiled where there is "
        "a compiler.",
    )
    run_dir: str | None = Field(
        default=None,
        description="Directory of the run, or an address (s3://bucket/run); null: runs/<name>. "
        "Never overwritten.",
    )
    model: ModelConfig = ModelConfig()
    tokenizer: Annotated[Chosen, Slot("tokenizer")] = Field(
        default_factory=_default("tokenizer", "auto")
    )
    media: MediaConfig = MediaConfig()
    cluster: Annotated[Chosen, Slot("cluster")] = Field(
        default_factory=_default("cluster", "local")
    )
    logging: LoggingConfig = LoggingConfig()
    record: RecordConfig = RecordConfig()
    stages: Annotated[tuple[StageConfig, ...], AfterValidator(_distinct_names)]

    @property
    def compiles(self) -> bool:
        """Return True if every learner can compute with compiled kernels."""
        return all(getattr(stage.learner, "compiles", False) for stage in self.stages)

    @model_validator(mode="after")
    def _kernels_are_for_all(self) -> RunConfig:
        if self.kernels == "compiled" and not self.compiles:
            raise ValueError(
                "kernels=compiled, but ranks compute by PyTorch's operations: set kernels: auto or "
                "torch"
            )
        return self


STAGE_KEYS = tuple(key for key in StageConfig.model_fields if key != "name")
