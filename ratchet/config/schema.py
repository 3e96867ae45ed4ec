"""The sections of a recipe and their default values.

`ratchet.config.loader` copies the stage keys at a recipe's top into each stage of a `RunConfig`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, SerializeAsAny, model_validator

from ratchet.config.base import Section
from ratchet.config.experience import (
    CurriculumConfig,
    ParityConfig,
    RolloutsConfig,
    SamplingConfig,
    Temperature,
)
from ratchet.config.lora import LoRAConfig
from ratchet.config.media_limits import MediaConfig
from ratchet.config.outputs import CheckpointConfig, LoggingConfig, RecordConfig
from ratchet.config.resolve import Slot, resolve
from ratchet.config.sections import (
    AlgorithmSection,
    ClusterSection,
    EnvironmentConfig,
    GeneratorSection,
    JudgeSection,
    LearnerSection,
    WeightSyncSection,
)
from ratchet.config.sentinels import SentinelsConfig


def _must_match(pattern: str, expected: str) -> AfterValidator:
    def check(text: str) -> str:
        if re.fullmatch(pattern, text) is None:
            raise ValueError(f"{text!r} must be {expected}")
        return text

    return AfterValidator(check)


Device = Annotated[
    str,
    _must_match(r"auto|cpu|mps|(cuda|xpu)(:\d+)?", "auto, cpu, cuda, cuda:N, mps, xpu or xpu:N"),
]
RunName = Annotated[
    str,
    _must_match(r"[A-Za-z0-9][\w.+-]*", "of letters, digits and _ . + -, as it names a directory"),
]
StageName = Annotated[
    str, _must_match(r"[A-Za-z_][\w-]*", "of letters, digits, _ and -, and not begin with a digit")
]


class ModelConfig(Section):
    """The model to train: a preset with random weights, or a model from a directory or the Hub."""

    preset: str | None = None
    """Shape of a model that starts from random weights; null: the model of path."""
    path: str | None = None
    """Model to start from: a directory, an address (s3://bucket/model), a Hub id, a run or
    RUN@STEP; null: the preset."""
    revision: str | None = None
    """Branch, tag or commit on the Hub; null: the default branch."""
    backend: Literal["auto", "ratchet", "transformers"] = "auto"
    """Implementation of the model: ratchet (the built-in decoder), transformers, or auto: the
    built-in decoder for the families that it supports."""
    overrides: dict[str, Any] = Field(default_factory=dict)
    """Fields of the preset's shape to change: {n_layers: 4}; with path, fields of its config.json
    that change no weight: {rope_parameters: {rope_type: yarn, factor: 4}}."""
    train_encoders: bool = False
    """Also train the image, audio and video encoders of a multimodal model."""
    freeze: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Weights that no update changes, by their names in a Hugging Face checkpoint: the name of a
    module, with all below it, or a pattern: [model.embed_tokens, '*.layernorm.weight']."""
    trust_remote_code: bool = False
    """Let transformers run code that comes with the model."""


class OptimizerConfig(Section):
    """AdamW (arXiv:1711.05101), and the keys that all optimizers share.

    Steps are optimizer steps here: batches x minibatches x epochs.
    """

    builds: ClassVar[str] = "ratchet.learners.optim.adamw:AdamW"
    needs_whole_matrices: ClassVar[bool] = False
    """True if a step computes with whole weight matrices, each of which a divided learner gathers
    on one rank."""
    required_package: ClassVar[str | None] = None
    """The package that implements the optimizer; None for PyTorch or Ratchet."""

    lr: float = Field(default=1e-5, gt=0)
    """Peak learning rate."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (
        0.9,
        0.95,
    )
    """Decay rates of the moving averages of gradients and of their squares."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the square root of the second moment."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay, on matrices only."""
    max_grad_norm: float | None = Field(default=1.0, gt=0)
    """Gradients of a larger norm are scaled down to this norm; null: never."""
    warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps in which the learning rate rises to lr."""
    warmup_share: float = Field(default=0.0, ge=0, le=1)
    """Share of the stage's optimizer steps in which the learning rate rises to lr, in place of
    warmup_steps."""
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """Course of the learning rate after the warm-up. wsd: constant, then a linear decay over the
    last decay_steps."""
    decay_steps: int = Field(default=0, ge=0)
    """Optimizer steps of the decay that ends a wsd schedule."""
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    """Final learning rate of a decaying schedule, as a share of lr."""
    ema_decay: float | None = Field(default=None, gt=0, lt=1)
    """Decay of an exponential moving average (EMA) of the weights, saved in model-ema/; null:
    none."""


AnySection = SerializeAsAny[Section]
if TYPE_CHECKING:
    AnyAlgorithm = AlgorithmSection
    AnyEnvironment = EnvironmentConfig
    AnyLearner = LearnerSection
    AnyGenerator = GeneratorSection
    AnyWeightSync = WeightSyncSection
    AnyCluster = ClusterSection
    AnyJudge = JudgeSection
else:
    # A user's section may derive from `Section` alone: `resolve` adds the attributes of the base.
    AnyAlgorithm = AnyEnvironment = AnyLearner = AnySection
    AnyGenerator = AnyWeightSync = AnyCluster = AnyJudge = AnySection


class EvaluationConfig(Section):
    """The evaluation of a stage on held-out tasks: accuracy or loss, at least before and after."""

    environment: Annotated[AnyEnvironment | None, Slot("environment", is_optional=True)] = None
    """Environment of the held-out tasks, judged by its own reward if it has one, else by
    eval_rewards; null: the stage's environment."""

    every: int = Field(default=0, ge=0)
    """Steps between evaluations; 0: only before and after the stage."""
    tasks: int = Field(default=512, ge=0)
    """Number of held-out tasks; 0: no evaluation at all."""
    samples: int = Field(default=0, ge=0)
    """Number of sampled attempts per task, besides the greedy one."""
    greedy: bool = True
    """Play one attempt per task at temperature 0; false: only the sampled ones."""
    pass_threshold: float = 1.0
    """Minimum reward of a sampled attempt that counts as passed (pass@k)."""
    temperature: Temperature | None = Field(default=None, gt=0)
    """Temperature of the sampled attempts; null: as in sampling."""
    max_new_tokens: int | None = Field(default=None, ge=1)
    """Maximum number of tokens in one completion; null: as in sampling."""
    patience: int = Field(default=0, ge=0)
    """Early stopping: the stage ends after this many evaluations in a row without a better metric;
    0: never."""
    metric: str | None = None
    """Metric of patience and stop_at. Lower is better for eval/loss, for eval/perplexity and for a
    metric with a minus before it, such as -policy/kl/kl. null: eval/accuracy, or eval/loss if no
    accuracy is measured."""
    min_gain: float = Field(default=0.0, ge=0)
    """A metric counts as better only if it improves by more than this."""
    stop_at: float | None = Field(default=None, allow_inf_nan=False)
    """The stage ends after an evaluation whose metric is at least this, or at most this if lower is
    better; before its first step if the model is as good already. null: never."""

    def check_keys(self) -> None:
        if not self.patience and "min_gain" in self.changed:
            raise ValueError("min_gain is not read with patience=0: set patience, or remove it")
        if not self.patience and self.stop_at is None and "metric" in self.changed:
            raise ValueError(
                "metric is not read without patience or stop_at: set one of them, or remove metric"
            )
        if self.patience and not self.every:
            raise ValueError(
                f"patience={self.patience} counts evaluations during the stage: set every above 0"
            )
        if self.stop_at is not None and not self.every:
            raise ValueError(
                f"stop_at={self.stop_at:g} is compared in evaluations between steps: set every"
            )
        if not self.greedy and not self.samples:
            raise ValueError("greedy=false and samples=0 leave no attempt: set samples")


def _make_section_factory(slot: str, kind: str) -> Any:
    return lambda: resolve(slot, {"kind": kind})


def get_default_rewards(environment: EnvironmentConfig | None) -> tuple[Section, ...]:
    """Return the environment's default rewards; () if its steps give the rewards."""
    default = "" if environment is None else environment.default_reward
    return (
        (resolve("rewards", {"kind": default} if isinstance(default, str) else default),)
        if default
        else ()
    )


def _choose_rewards(fields: dict[str, Any]) -> tuple[Section, ...]:
    return get_default_rewards(fields.get("environment"))


def _choose_eval_rewards(fields: dict[str, Any]) -> tuple[Section, ...]:
    return _choose_rewards(fields) or fields.get("rewards", ())


Rewards = Annotated[tuple[AnySection, ...], Slot("rewards", is_list=True)]


class StageConfig(Section):
    """A stage of a run: one algorithm for a number of steps.

    Every key can also stand at the top of a recipe, as the default of all stages.
    """

    name: StageName
    """Name of the stage; default: the algorithm's kind."""
    algorithm: Annotated[AnyAlgorithm, Slot("algorithm")]
    """Algorithm that turns a batch into an update."""
    environment: Annotated[AnyEnvironment, Slot("environment")]
    """Environment with the tasks and demonstrations."""
    rewards: Rewards = Field(default_factory=_choose_rewards)
    """Rewards that judge the attempts; default: the environment's own."""
    eval_rewards: Rewards = Field(default_factory=_choose_eval_rewards)
    """Rewards used in evaluation; default: the environment's own, whatever `rewards` says, or
    `rewards` if the environment has none."""
    agent: Annotated[AnySection | None, Slot("agent", is_optional=True)] = None
    """Agent that plays the attempts, through an OpenAI-compatible server; null: the policy itself
    plays in the environment."""
    steps: int | None = Field(default=100, ge=1)
    """Number of batches to train on; null: as many as `passes` needs."""
    passes: float | None = Field(default=None, gt=0)
    """Number of passes over the training data, in place of steps. It may be a fraction, such as
    0.5."""
    batch_size: int = Field(default=32, ge=1)
    """Number of groups (prompts, rows or pairs) in a step."""
    examples: int | None = Field(default=None, ge=1)
    """Number of distinct training tasks; null: no limit."""
    curriculum: CurriculumConfig | None = None
    """Order in which tasks are drawn; null: shuffled passes over all of them."""
    sampling: SamplingConfig = SamplingConfig()
    rollouts: RolloutsConfig = RolloutsConfig()
    optimizer: Annotated[SerializeAsAny[OptimizerConfig], Slot("optimizer")] = Field(
        default_factory=_make_section_factory("optimizer", "adamw")
    )
    """Optimizer that turns a gradient into a step."""
    lora: LoRAConfig | None = None
    """Train a LoRA adapter of the policy; null: all its weights."""
    learner: Annotated[AnyLearner, Slot("learner")] = Field(
        default_factory=_make_section_factory("learner", "local")
    )
    """Backend that computes gradients: one process, DTensor (FSDP2) or Megatron."""
    generator: Annotated[AnyGenerator, Slot("generator")] = Field(
        default_factory=_make_section_factory("generator", "engine")
    )
    """Engine that samples: Ratchet's own, vLLM, transformers, or worker processes."""
    weight_sync: Annotated[AnyWeightSync, Slot("weight_sync")] = Field(
        default_factory=_make_section_factory("weight_sync", "auto")
    )
    """How new weights reach the generator."""
    parity: ParityConfig = ParityConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    sentinels: SentinelsConfig = SentinelsConfig()

    @property
    def source(self) -> str | None:
        """Return the kind of training data; None if a custom algorithm does not declare it.

        The kinds are "rows", "pairs", "labelled", "steps" and "rollouts".
        """
        return self.algorithm.source

    @property
    def is_played_by_workers(self) -> bool:
        """True if the stage's groups are played in the generator's rollout workers."""
        return self.generator.plays_groups and self.source in ("rollouts", None)

    @property
    def n_steps(self) -> int:
        """Return the number of batches. If `passes` is set, call `resolve_passes` first."""
        assert self.steps is not None, "resolve_passes sets steps before the stage is used"
        return self.steps

    @property
    def optimizer_steps(self) -> int:
        return self.n_steps * self.algorithm.n_minibatches * self.algorithm.n_epochs

    @model_validator(mode="before")
    @classmethod
    def _drop_default_steps(cls, values: Any) -> Any:
        """Set `steps` to null in place of its default if `passes` is set."""
        if isinstance(values, dict) and values.get("passes") is not None and "steps" not in values:
            return {**values, "steps": None}
        return values


def _check_names(stages: tuple[StageConfig, ...]) -> tuple[StageConfig, ...]:
    if not stages:
        raise ValueError(
            "is empty: add a stage, or remove stages and write the keys of a single stage at the "
            "top"
        )
    names = [stage.name for stage in stages]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ValueError(f"two stages are called '{repeated[0]}': give each a name of its own")
    return stages


def _check_judge_names(judges: tuple[AnyJudge, ...]) -> tuple[AnyJudge, ...]:
    names = [judge.name for judge in judges]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ValueError(f"two judges are called '{repeated[0]}': give each a name of its own")
    return judges


Judges = Annotated[
    tuple[AnyJudge, ...], Slot("judge", is_list=True), AfterValidator(_check_judge_names)
]


class RunConfig(Section):
    """The settings of a whole run. Its stages train the same policy one after the other."""

    name: RunName = "run"
    """Name of the run; default: the recipe's file name."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of everything random."""
    device: Device = "auto"
    """Device of the models: cpu; cuda or cuda:N (NVIDIA, or AMD under ROCm); mps (Apple); xpu or
    xpu:N (Intel). auto: cuda if there is a CUDA device, else cpu."""
    threads: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """Number of CPU threads, divided among the workers; auto: the usable cores or OMP_NUM_THREADS,
    or 1 if more threads are no faster."""
    kernels: Literal["auto", "compiled", "torch"] = "auto"
    """Kernels of a float32 model on a CPU, matrix products excepted: compiled (C code, compiled on
    this machine) or torch. auto: compiled if there is a compiler."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Operands of matrix products in layers, and on CUDA devices the engine's KV cache; weights and
    sums are float32. auto: bfloat16 on CUDA devices, which have no other, else float32. On a CPU
    bfloat16 needs AVX512-BF16 or AMX; mps and xpu lack it."""
    run_dir: str | None = None
    """Directory of the run, or an address (s3://bucket/run); null: runs/<name>. Never
    overwritten."""
    import_dirs: tuple[str, ...] = ()
    """Further directories of modules that kinds may name (my_module:Thing); the recipe's own
    directory is added if it holds such a module."""
    model: ModelConfig = ModelConfig()
    tokenizer: Annotated[AnySection, Slot("tokenizer")] = Field(
        default_factory=_make_section_factory("tokenizer", "auto")
    )
    """Tokenizer and chat template; auto: the model's own."""
    media: MediaConfig = MediaConfig()
    judges: Judges = ()
    """Models of the run that judge attempts, for rewards with a key judge."""
    cluster: Annotated[AnyCluster, Slot("cluster")] = Field(
        default_factory=_make_section_factory("cluster", "local")
    )
    """Where ranks and workers run: this machine, Ray, or torchrun's processes."""
    logging: LoggingConfig = LoggingConfig()
    record: RecordConfig = RecordConfig()
    stages: Annotated[tuple[StageConfig, ...], AfterValidator(_check_names)]

    @property
    def can_use_compiled_kernels(self) -> bool:
        """True if every learner can compute with compiled kernels."""
        return all(stage.learner.supports_cpu_kernels for stage in self.stages)

    @property
    def rounds_products(self) -> bool:
        """True if products of layers have operands in bfloat16 on this device, which is known."""
        if self.precision == "auto":
            return self.device.startswith("cuda")
        return self.precision == "bfloat16"

    def check_keys(self) -> None:
        if self.kernels == "compiled" and not self.can_use_compiled_kernels:
            raise ValueError(
                "kernels=compiled, but a distributed learner computes with PyTorch's operations: "
                "set kernels: auto or torch"
            )


STAGE_KEYS = tuple(key for key in StageConfig.model_fields if key != "name")
