"""The base sections of algorithms, environments, learners, generators, weight syncs and judges.

Each base defines the attributes that the checks, the planner and the assembly of a run read, with
default values. A user's section need not derive from its base: `ratchet.config.resolve` adds the
attributes that it lacks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal, NamedTuple, Self

from pydantic import Field

from ratchet.config.base import Section

Source = Literal["rows", "pairs", "labelled", "steps", "rollouts"]
ALL_SOURCES: frozenset[str] = frozenset({"rows", "pairs", "labelled", "steps", "rollouts"})


class AlgorithmSection(Section):
    """The base section of algorithms."""

    source: ClassVar[Source]
    """The kind of training data: "rows" (demonstrations), "pairs" (a better and a worse answer),
    "labelled" (answers with a label), "steps" (answers with a label for each step) or "rollouts"
    (attempts that the policy samples)."""
    uses_mismatched_pairs: ClassVar[bool] = False
    """True if the loss needs a mismatched pair for each labelled row: its prompt with the answer to
    another prompt, as for the KL estimate of KTO."""

    @property
    def reads_reward(self) -> bool:
        """True if training depends on rewards; if False, attempts need no reward."""
        return True

    @property
    def n_attempts(self) -> int:
        """Return the number of attempts in a group."""
        return 1

    @property
    def n_minibatches(self) -> int:
        """Return the number of mini-batches of a batch, with one optimizer step each."""
        return 1

    @property
    def n_epochs(self) -> int:
        """Return the number of passes over all mini-batches of a batch."""
        return 1

    @property
    def splits_groups(self) -> bool:
        """True if a mini-batch has some attempts of every group; False if it has whole groups."""
        return False

    @property
    def corrects_rollouts(self) -> bool:
        """True if the algorithm corrects for the mismatch of the sampling and the trained policy.

        A rollout correction weights or masks tokens or answers.
        """
        return False

    @property
    def weights_rollouts(self) -> bool:
        """True if the rollout correction weights tokens or answers (importance sampling)."""
        return False

    @property
    def critic_warmup_steps(self) -> int:
        """Return the number of steps at the start of the stage that train the critic alone."""
        return 0

    def limit_critic_warmup(self, maximum: int) -> Self:
        """Return the section with at most `maximum` warm-up steps of the critic."""
        return self

    @property
    def penalty_starts(self) -> Mapping[int, int]:
        """Return the answer length, in tokens, above which each length penalty begins.

        The keys are indices in `algorithm.shaping`.
        """
        return {}

    @property
    def teacher_paths(self) -> tuple[str, ...]:
        """Return the directories of the teachers."""
        return ()

    def suggest_correction(self) -> str | None:
        """Return the recipe keys that correct for attempts sampled with older weights.

        Returns None if the algorithm needs no correction, or has one already.
        """
        return None


class EnvironmentConfig(Section):
    """The base section of environments."""

    default_reward: ClassVar[str] = ""
    """Kind of the reward if the recipe sets no `rewards`; "": none."""
    data_kinds: ClassVar[frozenset[str]] = frozenset({"rows", "rollouts"})
    """The kinds of training data that the environment offers (see `Source`)."""
    returns_rewards: ClassVar[bool] = True
    """True if the environment's steps return rewards. It is read only if `default_reward` is ""."""
    needs_media: ClassVar[bool] = False
    """True if every task has images, audio or videos."""
    has_scan: ClassVar[bool] = False
    """True if the section has the key `scan`, which makes the environment read all its rows when it
    is built."""

    def without_scan(self) -> Self:
        """Return the section without `scan`: building the environment reads only the first rows."""
        return self


class LearnerSection(Section):
    """The base section of learners."""

    is_distributed: ClassVar[bool] = False
    """True if the learner trains in processes of its own."""
    has_own_adamw: ClassVar[bool] = False
    """True if the learner has its own AdamW and supports no other optimizer."""
    supports_cpu_kernels: ClassVar[bool] = False
    """True if the learner can use Ratchet's CPU kernels."""
    supports_freeze: ClassVar[bool] = True
    """True if the learner supports `model.freeze`."""
    supports_background_save: ClassVar[bool] = False
    """True if the learner supports `checkpoint.background`: it saves by `save_state` or
    `save_blocks` alone, which `defer_writes` delays."""

    @property
    def tensor_ranks(self) -> int:
        """Return the number of ranks over which heads, MLPs and vocabulary are divided."""
        return 1

    @property
    def pipeline_ranks(self) -> int:
        """Return the number of ranks over which layers are divided."""
        return 1

    @property
    def expert_ranks(self) -> int:
        """Return the number of ranks over which the experts of a layer are divided."""
        return 1

    @property
    def uses_sequence_parallelism(self) -> bool:
        """True if each tensor-parallel rank holds a part of the tokens between matrix products."""
        return False

    @property
    def fp8_format(self) -> str | None:
        """Return the FP8 format of matrix products; None for no FP8."""
        return None

    @property
    def weight_format(self) -> str:
        """Return the format in which weights are stored and multiplied."""
        return "float32"

    @property
    def recomputes_layers(self) -> bool:
        """True if the backward recomputes whole layers."""
        return False

    @property
    def measures_workers(self) -> bool:
        """True if `workers` is auto: the run measures the best number when it starts."""
        return False

    def with_workers(self, workers: int) -> Self:
        """Return the section with the measured number of workers, if it is auto."""
        return self


class ModelSizes(NamedTuple):
    """The sizes of a model by which a generator may be unable to run it."""

    n_heads: int
    n_kv_heads: int
    head_dim: int
    n_layers: int
    n_experts: int  # per layer; 0 without experts


class GeneratorSection(Section):
    """The base section of generators."""

    can_offload: ClassVar[bool] = True
    """True if the generator can be offloaded from its accelerator (colocation)."""
    copies_weights: ClassVar[bool] = False
    """True if the generator has its own copy of the weights. The model that it is built with then
    provides only the first weights."""
    reports_kept_mass: ClassVar[bool] = True
    """True if the generator reports the probability mass that top-p, top-k and min-p keep."""
    records_masks: ClassVar[bool] = False
    """True if the generator records the tokens that a grammar allows."""
    min_temperature: ClassVar[float] = 0.0
    """The lowest positive temperature that the generator accepts."""
    rounds_like_learner: ClassVar[bool] = False
    """True if the generator computes with `precision` on a CPU, like the learner."""

    @property
    def sampler(self) -> GeneratorSection:
        """Return the section of the generator that samples.

        It is the section that kind=workers wraps, and otherwise this one.
        """
        return self

    @property
    def n_workers(self) -> int:
        """Return the number of worker processes; 0 if it generates in this process."""
        return 0

    @property
    def plays_groups(self) -> bool:
        """True if worker processes play whole groups (rollout workers)."""
        return False

    @property
    def quantisation(self) -> str | None:
        """Return the format to which the generator quantises its weights; None for none."""
        return None

    @property
    def max_lora_rank(self) -> int | None:
        """Return the largest rank of an adapter that the generator is started for.

        Returns None if it has no limit.
        """
        return None

    @property
    def reads_accelerator(self) -> bool:
        """True if it takes received weights only from an accelerator, not from host memory."""
        return False

    @property
    def request_limit(self) -> int | None:
        """Return the number of requests that are generated at the same time; None: no limit."""
        return None

    @property
    def accelerators(self) -> int:
        """Return the number of accelerators that the generator uses, if the machine has any."""
        return 1

    @property
    def environment(self) -> Mapping[str, str]:
        """Return environment variables for the start; the user's own values take precedence."""
        return {}

    def check_arguments(self) -> None:
        """Raise ConfigError for arguments that the generator's library refuses.

        This starts nothing, and does nothing if the library is not installed.
        """

    def explain_misfit(self, sizes: ModelSizes, *, on_cpu: bool) -> str | None:
        """Return the reason why the generator can't run a model of these sizes; None if it can."""
        return None


class ClusterSection(Section):
    """The base section of clusters."""

    @property
    def takes_turns(self) -> bool:
        """True if learner and generator use the same accelerators in turns (colocation)."""
        return False

    @property
    def is_resident(self) -> bool:
        """True if learner and generator use the same accelerators at the same time."""
        return False

    @property
    def shares_accelerators(self) -> bool:
        """True if learner and generator use the same accelerators, in turns or at once."""
        return self.takes_turns or self.is_resident


class WeightSyncSection(Section):
    """The base section of weight syncs."""

    @property
    def reads_accelerator(self) -> bool:
        """True if pushes read the learner's weights on its accelerator, not in host memory."""
        return False


class JudgeSection(Section):
    """The base section of the models of a recipe's `judges`."""

    name: str = Field(pattern=r"^[A-Za-z_][\w-]*$")
    """Name of this model. A reward refers to it with its key `judge`."""
    path: str = Field(min_length=1)
    """Directory, address (s3://bucket/model) or Hub id of the judge's model."""
    revision: str | None = None
    """Branch, tag or commit on the Hub; null: the default branch."""
    trust_remote_code: bool = False
    """True to let transformers run code that comes with the model."""
    template: str | None = None
    """Chat template; null: the template of the judge's tokenizer."""

    @property
    def n_processes(self) -> int:
        """Return the number of the judge's worker processes; 0 if it is in the run's process."""
        return 0

    @property
    def accelerators(self) -> int:
        """Return the number of accelerators of each process, if the machine has any."""
        return 1


class JudgedSection(Section):
    """The base section of rewards that a model of the recipe's `judges` may give."""

    judge_kind: ClassVar[str] = "language_model"
    """The kind of model that the reward needs."""
    calls_model: ClassVar[bool] = True
    """True, as in every reward that calls a service or loads a model."""

    judge: str | None = None
    """Name of the model in the recipe's judges that gives the reward; null: none of them."""


def list_judged(value: object) -> Iterator[JudgedSection]:
    """Yield every reward nested in `value` that a model of `judges` gives.

    This includes rewards inside other rewards.
    """
    if isinstance(value, JudgedSection) and value.judge is not None:
        yield value
    if isinstance(value, Section):
        value = dict(value)
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, tuple | list):
        for item in value:
            yield from list_judged(item)


# Attributes of user sections that do not derive from the base section of their slot. A slot is a
# place of the recipe for a section of any class, such as "algorithm"; "part", "worker_environment"
# and "problems" are places for environments inside an environment. These values take precedence
# over the base's: nothing is known of the training data of such an algorithm or environment, and
# such an advantage estimator is exempt from no property, so that all of them are checked.
USER_SECTION_ATTRIBUTES: Mapping[str, Mapping[str, Any]] = {
    "algorithm": {"source": None},
    **{
        slot: {"data_kinds": ALL_SOURCES}
        for slot in ("environment", "part", "worker_environment", "problems")
    },
    "advantage": {"exempt_under_kl": {}},
    "estimator": {"exempt_under_kl": {}},
}
