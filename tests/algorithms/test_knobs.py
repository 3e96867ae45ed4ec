"""No dead knobs: every key of every algorithm and of its parts changes a loss, a gradient or the
data that are asked for."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ratchet.algorithms.base import Algorithm, AlgoState
from ratchet.algorithms.scoring import fill_columns
from ratchet.config.base import Section
from ratchet.config.key_paths import find_section, find_slot
from ratchet.config.model_shape.decoder_config import DecoderConfig
from ratchet.config.registry import KINDS
from ratchet.config.resolve import build, resolve, section_class
from ratchet.config.schema import OptimizerConfig
from ratchet.data.chat.builtin_tokenizers import character_tokenizer
from ratchet.data.packing import pack
from ratchet.learners.config import LocalConfig
from ratchet.models.decoder import Decoder
from ratchet.models.policy import DecoderPolicy
from ratchet.training.roles import make_roles
from ratchet.types import Group, Message, Outcome, Owner, Scored, Task, Trajectory, Truncated, Turn

TOKENIZER = character_tokenizer("0123456789=")
TEACHERS: dict[str, str] = {}
TWO = [{"path": "first"}, {"path": "second"}]
EXPERTS = {
    "family": "qwen3_moe",
    "n_experts": 4,
    "experts_per_token": 2,
    "expert_intermediate_size": 12,
}


def model(seed: int = 0, **fields: Any) -> DecoderPolicy:
    config = DecoderConfig(TOKENIZER.vocab_size, 8, 1, 2, 1, 4, 12, init_std=0.4, **fields)
    return DecoderPolicy(Decoder(config).init_weights(seed).double())


@pytest.fixture(scope="module", autouse=True)
def teachers(tmp_path_factory):
    for seed, name in ((5, "first"), (6, "second"), (8, "third")):
        directory = tmp_path_factory.mktemp(name)
        model(seed).save(directory)
        TOKENIZER.save(directory)
        TEACHERS[name] = str(directory)
    other = tmp_path_factory.mktemp("other")
    tokenizer = character_tokenizer("=9876543210")
    model(7).save(other)
    tokenizer.save(other)
    TEACHERS["other tokens"] = str(other)


def trajectory(
    rng: np.random.Generator, *, outcome: Outcome | None, use: Any = "train", attempt: int = 0
) -> Trajectory:
    """A prompt and up to three turns with observations between; every second turn has a reward of
    its own."""
    owner = [Owner.PROMPT] * 2
    turns = []
    for number in range(int(rng.integers(1, 4))):
        start, length = len(owner), int(rng.integers(1, 5))
        owner += [Owner.POLICY] * length + [Owner.ENVIRONMENT] * int(rng.integers(0, 2))
        reward = float(rng.integers(0, 3)) / 2 if number % 2 else None
        malformed = {"malformed_call": number == 1, "malformed_thinking": number == 2}
        turns.append(Turn(start, start + length, reward, state_key=f"s{number}", **malformed))
    owners = np.array(owner, dtype=np.int8)
    policy = owners == Owner.POLICY
    return Trajectory(
        tokens=rng.integers(0, TOKENIZER.vocab_size, len(owner)),
        owner=owners,
        trainable=policy,
        rollout_logprobs=np.where(policy, rng.normal(-2.5, 0.8, len(owner)), 0.0).astype(
            np.float32
        ),
        versions=np.where(policy, 0, -1).astype(np.int32),
        attempt=attempt,
        use=use,
        turns=tuple(turns),
        outcome=outcome,
    )


def rollouts(rng: np.random.Generator, algorithm: Algorithm) -> Iterator[tuple[Trajectory, ...]]:
    for g in range(4):
        rows = []
        for attempt in range(4):
            a, b = (float(x) for x in rng.integers(0, 3, 2))
            if g == 3:
                a = b = 1.0  # a group whose rewards are all equal
            kind = Truncated if attempt == 2 else Scored
            rows.append(
                trajectory(
                    rng, outcome=kind(2 * a + b - 1, {"a": 2 * a, "b": b - 1}), attempt=attempt
                )
            )
        if algorithm.greedy_baseline:
            rows.append(trajectory(rng, outcome=Scored(0.5), use="baseline", attempt=9))
        yield tuple(rows)


def pairs(rng: np.random.Generator, algorithm: Algorithm) -> Iterator[tuple[Trajectory, ...]]:
    for _ in range(4):
        yield tuple(trajectory(rng, outcome=Scored(1.5 - i), attempt=i) for i in range(2))


def labelled(rng: np.random.Generator, algorithm: Algorithm) -> Iterator[tuple[Trajectory, ...]]:
    for g in range(4):
        yield (
            trajectory(rng, outcome=Scored(float(g % 2))),
            trajectory(rng, outcome=None, use="reference", attempt=1),
        )


def rows(rng: np.random.Generator, algorithm: Algorithm) -> Iterator[tuple[Trajectory, ...]]:
    for _ in range(4):
        yield (replace(trajectory(rng, outcome=None), temperature=algorithm.temperature),)


DATA = {"rollouts": rollouts, "pairs": pairs, "labelled": labelled, "rows": rows, "steps": rows}


def with_routes(row: Trajectory) -> Trajectory:
    """To the last two of the experts, whatever the router says."""
    return replace(row, routes=np.tile(np.array([2, 3], dtype=np.int16), (len(row), 1, 1)))


def fingerprint(algorithm: Algorithm) -> dict[str, Any]:
    """Two steps on the same data: everything that the learners measured, and what is asked of the
    source."""
    rng = np.random.default_rng(0)
    made = list(DATA[algorithm.source](rng, algorithm))
    task = Task("t", (Message("user", "?"),))
    groups = [
        Group(f"g{i}", replace(task, tag="even" if i % 2 == 0 else "odd"), one)
        for i, one in enumerate(made)
    ]
    routed = algorithm.replays_routes or "routers" in algorithm.required_outputs("policy")
    if routed:
        groups = [
            replace(group, trajectories=tuple(map(with_routes, group.trajectories)))
            for group in groups
        ]
    roles = make_roles(
        model(**(EXPERTS if routed else {})),
        TOKENIZER,
        algorithm,
        section=LocalConfig(),
        optimizer=OptimizerConfig(lr=0.02, eps=1e-3),
        steps=2,
    )
    state, updates = AlgoState(), []
    for _ in range(2):
        batch = algorithm.advantage(
            asyncio.run(fill_columns(pack(groups), algorithm, roles)), state
        )
        numbers = {f"batch/{name}": value for name, value in batch.metrics.items()}
        for mini in algorithm.split(batch):
            weighed = algorithm.weigh(mini, state)
            for role in algorithm.roles_to_update(state):
                update = asyncio.run(roles[role].update(weighed, algorithm.losses[role]))
                updates.append((role, sorted(update.items())))
                numbers |= {f"{role}/{name}": value for name, value in update.items()}
        algorithm.observe(state, numbers)
    asked = (algorithm.group_size, algorithm.turns, algorithm.temperature)
    return {"updates": updates, "asked": asked}


PG = "policy_gradient"
AGAIN = {"epochs": 3}  # ratios away from 1
KL = {"kl": {"coef": 0.1}}
PPO_ = {"critic": {"value_clip": 0.01}, **AGAIN}


def adv(kind: str, **options: Any) -> dict[str, Any]:
    return {"advantage": {"kind": kind, **options}}


def loss(kind: str, **options: Any) -> dict[str, Any]:
    return {"loss": {"kind": kind, **options}, **AGAIN}


def shaped(kind: str, **options: Any) -> dict[str, Any]:
    return {"shaping": [{"kind": kind, **options}]}


# kind of algorithm, keys around, the key, and two values of it.
CASES: list[tuple[str, dict[str, Any], str, Any, Any]] = [
    (PG, {}, "minibatches", 1, 2),
    (PG, {"minibatches": 2}, "minibatches_of", "groups", "attempts"),
    (PG, {}, "epochs", 1, 2),
    (PG, {}, "group_size", 4, 8),
    (PG, {}, "advantage_clip", None, 0.1),
    (PG, {}, "advantage_clip", 0.1, (-0.1, 0.2)),
    (PG, {}, "malformed_call_advantage", None, -5.0),
    (PG, {}, "malformed_thinking_advantage", -1.0, -5.0),
    (PG, {}, "whiten", False, True),
    (PG, {}, "equal_rewards", "keep", "drop"),
    (PG, shaped("length_penalty", coef=0.1), "equal_rewards", "drop", "drop_shaped"),
    (PG, {}, "mean_reward_range", None, (0.4, 1.0)),
    (PG, {}, "truncated", "keep", "drop"),
    (PG, AGAIN, "old_logprobs", "learner", "sampler"),
    (PG, {}, "entropy_coef", 0.0, 0.1),
    (PG, {}, "positive_nll_coef", 0.0, 0.1),
    (PG, {"positive_nll_coef": 0.1}, "positive_nll_above", 0.0, 1.0),
    (PG, {}, "weighting", "token_mean", "sequence_mean"),
    (PG, {}, "weighting", "sequence_mean", "prompt_mean"),
    (PG, {}, "weighting", "prompt_mean", "token_sum"),
    (PG, {"weighting": "fixed_length"}, "fixed_length", 5, 9),
    (PG, {}, "teacher", None, "first"),
    (PG, {"teacher": "first"}, "teacher_tokens", "same", "aligned"),
    # advantages
    (PG, adv("group_relative"), "advantage.scale", "std", "none"),
    (PG, adv("group_relative"), "advantage.scale", "std", "batch_std"),
    (PG, adv("group_relative"), "advantage.epsilon", 1e-6, 0.1),
    (PG, adv("rloo"), "advantage.scale", "std", "none"),
    (PG, adv("rloo", scale="std"), "advantage.epsilon", 1e-6, 0.1),
    (PG, adv("reinforce_pp"), "advantage.baseline", "none", "group"),
    (PG, adv("reinforce_pp"), "advantage.epsilon", 1e-6, 0.1),
    (PG, adv("gdpo"), "advantage.weights", {"a": 1.0}, {"a": 1.0, "b": 0.5}),
    (PG, adv("gdpo"), "advantage.epsilon", 1e-6, 0.1),
    (PG, {**adv("gae"), "critic": {}}, "advantage.gamma", 1.0, 0.8),
    (PG, {**adv("gae"), "critic": {}}, "advantage.lam", 1.0, 0.8),
    (PG, {**adv("gae"), "critic": {}}, "advantage.value_lam", None, 0.3),
    (PG, {**adv("gae"), "critic": {}}, "advantage.length_alpha", None, 0.2),
    (PG, {**adv("gae"), "critic": {}}, "advantage.bootstrap", True, False),
    (PG, adv("turn_returns"), "advantage.gamma", 1.0, 0.5),
    (PG, adv("turn_returns"), "advantage.baseline", "none", "group"),
    (PG, adv("gigpo"), "advantage.gamma", 1.0, 0.5),
    (PG, adv("gigpo"), "advantage.step_weight", 1.0, 0.5),
    (PG, adv("gigpo"), "advantage.scale", "std", "none"),
    (PG, adv("gigpo"), "advantage.epsilon", 1e-6, 0.1),
    (PG, adv("mixture"), "advantage.parts", [{"kind": "rloo"}], [{"kind": "rloo"}, {"kind": "opo"}]),
    (PG, adv("mixture"), "advantage.parts", [{"kind": "rloo", "weight": 1.0}], [{"kind": "rloo", "weight": 0.5}]),
    # policy losses
    (PG, loss("ppo"), "loss.clip_low", 0.01, 0.9),
    (PG, loss("ppo"), "loss.clip_high", 0.01, 9.0),
    (PG, loss("ppo", clip_high=9.0), "loss.dual_clip", None, 1.01),
    (PG, loss("gspo"), "loss.clip_low", 1e-3, 0.9),
    (PG, loss("gspo"), "loss.clip_high", 1e-3, 9.0),
    (PG, loss("gspo_token"), "loss.clip_low", 1e-3, 0.9),
    (PG, loss("gspo_token"), "loss.clip_high", 1e-3, 9.0),
    (PG, loss("cispo"), "loss.clip_low", None, 0.01),
    (PG, loss("cispo"), "loss.clip_high", 0.01, 9.0),
    (PG, loss("topr"), "loss.negative_low", 0.0, 0.9),
    (PG, loss("topr"), "loss.negative_high", 0.5, 2.0),
    (PG, loss("gmpo"), "loss.clip_low", 1e-3, 0.9),
    (PG, loss("gmpo"), "loss.clip_high", 1e-3, 9.0),
    (PG, loss("sapo"), "loss.tau_pos", 1.0, 2.0),
    (PG, loss("sapo"), "loss.tau_neg", 1.0, 2.0),
    (PG, loss("kimi"), "loss.tau", 0.1, 1.0),
    # correction, KL, routers, critic
    (PG, {}, "correction.weight", "token", "turn"),
    (PG, {}, "correction.weight", "sequence", "geometric"),
    (PG, {}, "correction.weight_low", 0.0, 0.9),
    (PG, {}, "correction.weight_high", 2.0, 1.1),
    (PG, {}, "correction.mask", "token", "geometric"),
    (PG, {"correction": {"mask": "token"}}, "correction.mask_low", 0.5, 0.9),
    (PG, {"correction": {"mask": "token"}}, "correction.mask_high", 2.0, 1.1),
    (PG, {"correction": {"mask": "token"}}, "correction.mask_denominator", "all", "kept"),
    (PG, AGAIN, "kl.coef", 0.1, 0.2),
    (PG, {**KL, **AGAIN}, "kl.objective", "reverse", "forward"),
    (PG, {**KL, **AGAIN}, "kl.estimator", "k1", "k2"),
    (PG, {**KL, **AGAIN}, "kl.estimator", "k2", "k3"),
    (PG, {"kl": {"coef": 0.1, "objective": "forward"}, **AGAIN}, "kl.importance_weight", True, False),
    (PG, {**KL, **adv("rloo"), "minibatches": 2}, "kl.place", "loss", "reward"),
    (PG, {**KL, **AGAIN}, "kl.target", None, 1e-4),
    (PG, {"kl": {"coef": 0.1, "target": 1e-4}, **AGAIN}, "kl.rate", 0.1, 1.0),
    (PG, {}, "router.replay", False, True),
    (PG, {}, "router.balance_coef", 0.0, 0.1),
    (PG, {}, "router.z_coef", 0.0, 0.1),
    (PG, {"router": {"replay": True}}, "router.measure", True, False),
    ("ppo", {}, "critic.lr", None, 0.5),
    ("ppo", {}, "critic.warmup_steps", 0, 1),
    ("ppo", PPO_, "critic.value_clip", 0.01, None),
    # shaping
    (PG, shaped("overlong_penalty", max_length=6, buffer=2), "shaping.0.max_length", 6, 4),
    (PG, shaped("overlong_penalty", max_length=6, buffer=2), "shaping.0.buffer", 2, 5),
    (PG, shaped("overlong_penalty", max_length=6, buffer=2), "shaping.0.factor", 1.0, 0.5),
    (PG, shaped("stop_properly", coef=0.0), "shaping.0.coef", 0.0, 0.5),
    (PG, shaped("length_penalty", coef=0.1), "shaping.0.coef", 0.1, 0.2),
    (PG, shaped("length_penalty", coef=0.1), "shaping.0.free", 0, 3),
    (PG, shaped("effort_length", max_length=6), "shaping.0.max_length", 6, 4),
    (PG, shaped("effort_length", max_length=6), "shaping.0.bonus", 1.0, 0.5),
    (PG, shaped("effort_length", max_length=2), "shaping.0.penalty", 1.0, 0.5),
    (PG, shaped("effort_length", max_length=6), "shaping.0.tags", (), ("absent",)),
    (PG, {**shaped("scale", factor=1.0), **adv("rloo")}, "shaping.0.factor", 1.0, 0.5),
    (PG, {**shaped("scale", factor=1.0), **adv("turn_returns")}, "shaping.0.shift", 0.0, -1.0),
    (PG, shaped("clip", low=-9.0), "shaping.0.low", -9.0, 1.0),
    (PG, shaped("clip", high=9.0), "shaping.0.high", 9.0, 1.0),
    (PG, {**shaped("normalise", over="batch"), **adv("rloo")}, "shaping.0.over", "batch", "group"),
    (PG, {**shaped("normalise", over="batch"), **adv("rloo")}, "shaping.0.over", "batch", "running"),
    (PG, {**shaped("normalise", over="batch"), **adv("turn_returns")}, "shaping.0.center", True, False),
    (PG, {**shaped("normalise", over="batch"), **adv("rloo")}, "shaping.0.epsilon", 1e-6, 0.1),
    (PG, shaped("component_weights", weights={"a": 1.0}), "shaping.0.weights", {"a": 1.0}, {"b": 1.0}),
    # given text
    ("sft", {}, "train", "all", "last"),
    ("sft", {}, "train", "all", "text"),
    ("distill_off_policy", {"teacher": "first"}, "train", "all", "text"),
    ("sft", {}, "weighting", "token_mean", "sequence_mean"),
    ("dpo", AGAIN, "beta", 0.1, 0.5),
    ("dpo", {}, "label_smoothing", 0.0, 0.2),
    ("dpo", AGAIN, "normalize", "sum", "mean"),
    ("dpo", {}, "sft_coef", 0.0, 0.1),
    ("ipo", AGAIN, "beta", 0.1, 0.5),
    ("ipo", AGAIN, "normalize", "sum", "mean"),
    ("rpo", AGAIN, "beta", 0.1, 0.5),
    ("rpo", AGAIN, "eta", 1.0, 2.0),
    ("rpo", AGAIN, "normalize", "sum", "mean"),
    ("simpo", {}, "beta", 2.0, 1.0),
    ("simpo", {}, "gamma", 1.0, 0.5),
    ("orpo", {}, "odds_coef", 0.1, 0.5),
    ("kto", AGAIN, "beta", 0.1, 0.5),
    ("kto", {}, "desirable", 1.0, 0.5),
    ("kto", {}, "undesirable", 1.0, 0.5),
    ("distill_off_policy", {"teacher": "first"}, "teacher", "first", "second"),
    ("distill_off_policy", {"teacher": "first"}, "teacher", "first", {"even": "first", "odd": "second"}),
    ("distill_off_policy", {"teacher": "first"}, "objective", "forward", "reverse"),
    ("distill_off_policy", {"teacher": "first"}, "objective", "js", "mixed"),
    ("distill_off_policy", {"teacher": "first"}, "objective", "skewed_forward", "skewed_reverse"),
    ("distill_off_policy", {"teacher": "first", "objective": "js"}, "mix", None, 0.2),
    ("distill_off_policy", {"teacher": "first"}, "top_k", None, 3),
    ("distill_off_policy", {"teacher": "first"}, "temperature", 1.0, 2.0),
    ("distill_off_policy", {"teacher": "first"}, "sft_coef", 0.0, 0.2),
    ("distill_off_policy", {"teacher": "first", "objective": "adaptive"}, "mix", None, 0.05),
    ("distill_off_policy", {"teacher": "first"}, "teacher_temperature", 1.0, 2.0),
    ("distill_off_policy", {"teacher": "first"}, "token_clip", None, 0.05),
    ("distill_off_policy", {"teacher": "first"}, "teacher_tokens", "same", "aligned"),
    ("distill_off_policy", {"teacher": "first", "teacher_tokens": "aligned"}, "span_temperature", 1.0, 9.0),
    ("distill_off_policy", {"teacher": TWO, "top_k": None}, "teacher.0.weight", None, 2.0),
    ("distill_off_policy", {"teacher": TWO, "top_k": None}, "teacher.0.path", "first", "third"),
    ("distill_on_policy", {"teacher": "first"}, "teacher_temperature", 1.0, 0.5),
    ("distill_on_policy", {"teacher": "first"}, "token_clip", 0.1, 0.05),
    ("distill_on_policy", {"teacher": "first"}, "group_size", 1, 2),
]  # fmt: skip


def with_key(options: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    first, _, rest = key.partition(".")
    if rest and isinstance(options.get(first), list):
        part, *others = options[first]
        return {**options, first: [with_key(part, rest.partition(".")[2], value), *others]}
    return {**options, first: with_key(options.get(first) or {}, rest, value) if rest else value}


def made(kind: str, options: dict[str, Any]) -> Section:
    options = dict(options)
    teacher = options.get("teacher")
    if teacher is not None:
        aligned = options.get("teacher_tokens") == "aligned"
        if isinstance(teacher, list):
            named = [{**part, "path": TEACHERS[part["path"]]} for part in teacher]
        elif isinstance(teacher, dict):
            named = {tag: TEACHERS[name] for tag, name in teacher.items()}
        else:
            named = TEACHERS[teacher]
        options["teacher"] = TEACHERS["other tokens"] if aligned else named
        if kind == PG:
            options["advantage"] = {"kind": "on_policy_distillation"}
    return resolve("algorithm", {"kind": kind, **options})


@pytest.mark.medium
@pytest.mark.parametrize(("kind", "options", "key", "low", "high"), CASES)
def test_a_key_changes_what_is_learned_or_asked_for(
    kind: str, options: dict[str, Any], key: str, low: Any, high: Any
):
    found = []
    for value in (low, high):
        section = made(kind, with_key(options, key, value))
        found.append(fingerprint(build(section)))
    assert found[0] != found[1], f"{kind}: {key}={low} and {high} make no difference"


def declared(model: type[Section]) -> Iterator[tuple[type[Section], str]]:
    """(class that declares it first, name) of every key of a section and of all that may stand
    below it."""
    for name, field in model.model_fields.items():
        if name == "kind":
            continue
        owner = next(
            c for c in reversed(model.__mro__) if name in getattr(c, "__annotations__", {})
        )
        slot, inner = find_slot(field), find_section(field.annotation)
        if slot is not None:
            for kind in KINDS[slot.name]:
                yield from declared(section_class(slot.name, kind))
        elif inner is not None:
            yield from declared(inner)
        if slot is None or slot.name == "estimator":
            yield owner, name


def turned(model: type[Section], options: Any, key: str) -> tuple[type[Section], str]:
    """Which declared key a case turns."""
    first, _, rest = key.partition(".")
    field = model.model_fields[first]
    slot, inner = find_slot(field), find_section(field.annotation)
    if not rest:
        return next(
            c for c in reversed(model.__mro__) if first in getattr(c, "__annotations__", {})
        ), first
    if slot is not None and slot.is_list:
        (part,) = options[first]
        return turned(section_class(slot.name, part["kind"]), part, rest.partition(".")[2])
    if slot is not None:
        return turned(section_class(slot.name, options[first]["kind"]), options[first], rest)
    assert inner is not None
    if isinstance(options.get(first), list):
        return turned(inner, options[first][0], rest.partition(".")[2])
    return turned(inner, options.get(first) or {}, rest)


# `weight` of a mixture's part is turned through `parts`; sections are turned through their keys.
THROUGH_OTHERS = {"weight", "correction", "kl", "router", "critic"}


def test_every_key_is_turned_by_a_case():
    cases = {
        turned(section_class("algorithm", kind), options, key) for kind, options, key, *_ in CASES
    }
    everything = {
        key for kind in KINDS["algorithm"] for key in declared(section_class("algorithm", kind))
    }
    missing = {
        f"{owner.__name__}.{name}"
        for owner, name in everything - cases
        if name not in THROUGH_OTHERS
    }
    assert not missing
