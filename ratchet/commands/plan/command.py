"""The command `ratchet plan`: memory by phase and role, and time by phase, before the recipe is
run.

Memory follows from shapes, or from a short run of the recipe plus what that was too short to see.
Time on this machine is measured by that run (`ratchet.commands.plan.probe`); time on accelerators
that are not here is estimated from data sheets (`ratchet.executors.datasheets`).

P = parameters of a model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ratchet.algorithms.base import Algorithm
from ratchet.commands.plan.probe import Probe
from ratchet.config.model_shape.decoder_config import DecoderConfig
from ratchet.config.model_shape.lora_targets import resolve_decoder_targets
from ratchet.config.model_shape.presets import get_preset
from ratchet.config.resolve import build
from ratchet.config.schema import RecordConfig, RunConfig, StageConfig
from ratchet.data.chat.renderer import Renderer
from ratchet.errors import ConfigError, ModelError
from ratchet.experience.sources.tasks import TaskStream
from ratchet.generators.engine.running_requests import CHUNK_ELEMENTS
from ratchet.learners.compute.forward import resolve_chunk_mib
from ratchet.learners.compute.microbatching import resolve_micro_batch_tokens
from ratchet.models.flops import DecoderCost
from ratchet.models.load import find_model
from ratchet.models.weights.hf_weights import read_config
from ratchet.observe.records.writer import MOST_STEPS, MOST_TOKENS
from ratchet.protocols import HasLabelledAnswers, HasPreferencePairs, HasStepLabels
from ratchet.training.from_config import build_env_setup, get_chat_template
from ratchet.training.stage import EnvSetup
from ratchet.types import Task

MIB = 2**20
MASTER = 4  # bytes of a weight, of its gradient and of each moment: float32
CHUNKS = 3  # copies of the logits that exist at a time: themselves, their softmax, and its gradient
MOMENTS: Mapping[str, float] = {
    "muon": 4,
    "adamw8bit": 2 + 8 / 256,
}  # bytes a weight that optimizers keep, where not two moments
TASKS = 64  # whose lengths are looked at
# bytes of a token that the engine keeps for a running request: its id, two log-probabilities
SLOT = 8 + 4 + 4
# bytes that the record keeps of each until a file is written
RECORDED_ROW, RECORDED_TOKEN = 400, 30
WRITTEN = 2  # times that they are there by then: as they came, and as the file has them
COPY = "copy for checkpoints"


@dataclass(frozen=True)
class Device:
    """The memory constants of one process. compute_bytes: of a number in products. fixed: bytes of
    an empty process."""

    kind: str
    fixed: int
    compute_bytes: int = 4


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by purpose. held: always; the phases: on top of it.

    by_turns: True if each phase frees its memory before the next; else they add up, as the engine
    keeps its cache, and a process what it has freed.
    """

    held: Mapping[str, int]
    phases: Mapping[str, Mapping[str, int]]
    by_turns: bool = False

    @property
    def peak(self) -> int:
        sizes = [sum(parts.values()) for parts in self.phases.values()]
        return sum(self.held.values()) + (max(sizes, default=0) if self.by_turns else sum(sizes))


@dataclass(frozen=True)
class StagePlan:
    """The plan of a stage. flop: of a step, by phase, at most. recorded: steps that the record
    keeps in memory at a time, at most."""

    name: str
    steps: int
    load: Load
    memory: MemoryPlan
    flop: Mapping[str, float]
    recorded: int


@dataclass(frozen=True)
class Load:
    """The work of a step.

    rows: sequences. prompt, length: tokens of the longest prompt and sequence of a few tasks.
    attempts: generated at a time, in training and in evaluation; 0 for given text. passes: forwards
    before the update; updates: forwards and backwards of it, of each row.
    """

    rows: int
    prompt: int
    length: int
    attempts: int
    evaluated: int
    passes: int
    updates: int

    @property
    def tokens(self) -> int:
        return self.rows * self.length

    def flop(self, cost: DecoderCost) -> dict[str, float]:
        """Return the FLOP of a step, by phase. A backward takes twice as much as a forward."""
        forward = cost.forward_flop(self.tokens, self.length / 2)
        sampled = forward if self.attempts else 0.0
        return {
            "sample": sampled,
            "score": self.passes * forward,
            "update": 3 * self.updates * forward,
        }


def plan_stage(config: RunConfig, index: int, cost: DecoderCost, device: Device) -> StagePlan:
    """Plan one stage. cost: of the model that the run begins with. Raises DataError for data that
    can't be read."""
    stage = config.stages[index]
    algorithm: Algorithm = build(stage.algorithm)
    load = measure_load(config, index, algorithm, cost.shape)
    memory, recorded = (
        estimate_memory(stage, algorithm, cost, device, load),
        recorded_steps(stage, config.record, load),
    )
    if recorded:
        share = min(1.0, (config.record.groups or stage.batch_size) / stage.batch_size)
        each = share * (load.rows * RECORDED_ROW + load.tokens * RECORDED_TOKEN)
        memory = replace(memory, held={**memory.held, "record": int(WRITTEN * recorded * each)})
    return StagePlan(stage.name, stage.steps, load, memory, load.flop(cost), recorded)


def run_peak(plans: Sequence[StagePlan], probe: Probe | None) -> int:
    """Return the peak bytes of the process over all stages. A short run has seen everything except
    the longest files of the record, and copies for checkpoints."""
    if probe is None:
        return max(plan.memory.peak for plan in plans)
    copy = max(plan.memory.held.get(COPY, 0) for plan in plans)
    measured = list(zip(plans, probe.stages, strict=True))
    largest = max(probed.tables * plan.recorded for plan, probed in measured)
    seen = max(probed.tables * probed.recorded for _, probed in measured)
    return probe.peak + copy + int(WRITTEN * max(0.0, largest - seen))


def recorded_steps(stage: StageConfig, record: RecordConfig, load: Load) -> int:
    """Return the steps that lie in memory before their file is written: none are kept beyond a
    save."""
    if not record.every:
        return 0
    recorded = min(stage.steps, stage.checkpoint.every or stage.steps) // record.every
    return min(recorded, MOST_STEPS, -(-MOST_TOKENS // load.tokens))


def read_shape(config: RunConfig) -> DecoderConfig:
    """Return the shape of the model that the run begins with. Raises ConfigError for an
    architecture of unknown cost."""
    source = config.model
    if source.path is None:
        assert source.preset is not None, (
            "the configuration lets neither path nor preset through without the other"
        )
        vocabulary = build(config.tokenizer, None).vocab_size
        return get_preset(source.preset, vocab_size=vocabulary, **source.overrides)
    try:
        return read_config(find_model(source.path, revision=source.revision))
    except ModelError as error:
        raise ConfigError(
            f"a plan knows the shapes of Ratchet's own decoder, and not of {source.path}: {error}"
        ) from error


def measure_load(config: RunConfig, index: int, algorithm: Algorithm, shape: DecoderConfig) -> Load:
    stage = config.stages[index]
    prompt, length = measure_lengths(config, index, algorithm, shape)
    rows = stage.batch_size * stage.attempts * (2 if algorithm.source == "pairs" else 1)
    at_most = getattr(stage.generator, "max_running", 2**30)
    played = (
        stage.evaluation.tasks * max(1, stage.evaluation.samples)
        if answers(stage, algorithm)
        else 0
    )
    return Load(
        rows=rows,
        prompt=prompt,
        length=length,
        attempts=min(at_most, rows) if algorithm.source == "rollouts" else 0,
        evaluated=min(at_most, played),
        passes=len(algorithm.passes),
        updates=stage.epochs * len(algorithm.losses),
    )


def measure_lengths(
    config: RunConfig, index: int, algorithm: Algorithm, shape: DecoderConfig
) -> tuple[int, int]:
    """Return (tokens of the longest prompt, tokens of the longest sequence) of a few tasks."""
    stage, arena = config.stages[index], build_env_setup(config.stages[index])
    tokenizer = build(config.tokenizer, config.model.path)
    renderer = Renderer(
        tokenizer,
        get_chat_template(config),
        tool_format=getattr(config.tokenizer, "tool_format", "auto"),
    )
    tasks = [task for _, task in TaskStream(arena.environment, seed=config.seed).take(TASKS)]
    prompts = [len(renderer.prompt(task.messages)) if task.messages else 0 for task in tasks]
    if algorithm.source == "rollouts":
        length = max(prompts) + stage.sampling.max_new_tokens
    else:
        length = max(_given(arena, renderer, task, algorithm) for task in tasks)
    return min(max(prompts), shape.max_positions), min(length, shape.max_positions)


def _given(arena: EnvSetup, renderer: Renderer, task: Task, algorithm: Algorithm) -> int:
    """Return the tokens of the longest row that a task makes."""
    place = arena.environment
    if algorithm.source == "pairs" and isinstance(place, HasPreferencePairs):
        compared = place.comparison(task)
        answers = [compared.chosen, compared.rejected]
    elif algorithm.source == "labelled" and isinstance(place, HasLabelledAnswers):
        answers = [place.judged(task).messages]
    elif algorithm.source == "steps" and isinstance(place, HasStepLabels):
        return len(renderer.prompt(task.messages)) + sum(
            len(renderer.tokenizer.encode(text)) for text, _ in place.steps(task)
        )
    else:
        answers = [place.demonstration(task)]
    return max(
        len(renderer.supervised((*task.messages, *answer), train="last")[0]) for answer in answers
    )


def answers(stage: StageConfig, algorithm: Algorithm) -> bool:
    """Return True if the policy answers in the stage's evaluations."""
    return bool(stage.eval_rewards) or algorithm.source == "rollouts"


def estimate_memory(
    stage: StageConfig, algorithm: Algorithm, cost: DecoderCost, device: Device, load: Load
) -> MemoryPlan:
    learner, shape = stage.learner, cost.shape
    hands = getattr(learner, "workers", 1)
    hands = int(hands) if device.kind == "cpu" and hands != "auto" else 1
    trained = trained_parameters(stage, algorithm, cost)
    max_tokens = resolve_micro_batch_tokens(
        getattr(learner, "micro_batch_tokens", "auto"), device.kind
    )
    each = -(-load.tokens // (hands * stage.minibatches))
    micro = max(min(max_tokens, each), load.length)
    kept = cost.activation_bytes(
        device.compute_bytes, checkpointing=getattr(learner, "activation_checkpointing", False)
    )
    chunk = resolve_chunk_mib(getattr(learner, "logprob_chunk_mib", "auto"), device.kind) * MIB
    phases = {
        "update": {
            "gradients": trained * MASTER * hands,
            "activations": micro * kept * hands,
            "logits": CHUNKS * min(chunk, micro * shape.vocab_size * MASTER) * hands,
        }
    }
    if rows := max(load.attempts, load.evaluated):
        slots = _power_of_two(rows) * _power_of_two(load.length)
        logits = min(rows * shape.vocab_size, CHUNK_ELEMENTS)
        phases["sample"] = {
            "keys and values": slots * cost.kv_bytes(device.compute_bytes),
            "histories": slots * SLOT,
            "logits": CHUNKS * logits * MASTER,
        }
    return MemoryPlan({"process": device.fixed, **_roles(stage, algorithm, cost, device)}, phases)


def trained_parameters(stage: StageConfig, algorithm: Algorithm, cost: DecoderCost) -> int:
    """Return the trained parameters of all roles."""
    return _trained(stage, cost) * len(algorithm.losses)


def frozen_parameters(stage: StageConfig, algorithm: Algorithm, cost: DecoderCost) -> int:
    """Return the parameters of models that only score."""
    scoring = [name for name in algorithm.roles if name not in algorithm.losses]
    return sum(_role_parameters(stage, algorithm, cost, name) for name in scoring)


def _role_parameters(stage: StageConfig, algorithm: Algorithm, cost: DecoderCost, name: str) -> int:
    """Return the parameters of a role beside the policy: its own model's, a copy's, or 0 if it is
    the policy without its adapter."""
    path = algorithm.roles[name].path
    if path is not None:
        return DecoderCost(read_config(find_model(path))).parameters
    return cost.parameters if stage.lora is None else 0


def _roles(
    stage: StageConfig, algorithm: Algorithm, cost: DecoderCost, device: Device
) -> dict[str, int]:
    """Return the bytes of each role's weights, and of the optimizer state of those that train."""
    role_bytes = {"policy: weights": cost.parameters * MASTER}
    if device.compute_bytes != MASTER:
        role_bytes["policy: weights in half precision"] = cost.parameters * device.compute_bytes
    for name in algorithm.roles:
        if own := _role_parameters(stage, algorithm, cost, name):
            role_bytes[f"{name}: weights"] = own * MASTER
    for name in algorithm.losses:
        role_bytes[f"{name}: optimizer"] = int(
            _trained(stage, cost) * MOMENTS.get(getattr(stage.optimizer, "kind", ""), 2 * MASTER)
        )
        if stage.optimizer.ema_decay is not None:
            role_bytes[f"{name}: average"] = _trained(stage, cost) * MASTER
    if stage.checkpoint.background and stage.checkpoint.every:
        role_bytes[COPY] = sum(role_bytes.values())
    return role_bytes


def _trained(stage: StageConfig, cost: DecoderCost) -> int:
    """Return the parameters that an optimizer moves."""
    return (
        cost.parameters
        if stage.lora is None
        else cost.adapter(resolve_decoder_targets(cost.shape, stage.lora), stage.lora.rank)
    )


def _power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()
