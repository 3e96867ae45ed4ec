"""What fills columns before the update, and what an algorithm remembers between updates."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from ratchet.algorithms.base import Algorithm, AlgoState, Pass, Role
from ratchet.algorithms.scoring import fill_columns
from ratchet.algorithms.teacher_passes import build_teacher_passes
from ratchet.batch import Batch
from ratchet.config.model_shape.decoder_config import DecoderConfig
from ratchet.config.resolve import build, resolve
from ratchet.config.schema import OptimizerConfig
from ratchet.data.packing import pack
from ratchet.errors import DataError
from ratchet.learners.config import LocalConfig
from ratchet.learners.local import LocalLearner
from ratchet.models.decoder import Decoder
from ratchet.models.policy import DecoderPolicy
from ratchet.testing.builders import make_group, make_trajectory


class Counter:
    """A role whose every column counts the calls, and that notes what it was asked."""

    def __init__(self, first: float) -> None:
        self.calls: list[tuple[list[str], int, list[str]]] = []
        self.first = first

    async def score(
        self, batch: Batch, wanted: Sequence[str], *, top_k: int = 0
    ) -> Mapping[str, Tensor]:
        self.calls.append((list(wanted), top_k, list(batch.group_ids)))
        size = {"scores": (batch.n_sequences,), "topk_logprobs": (batch.n_tokens, 2)}
        return {
            name: torch.full(size.get(name, (batch.n_tokens,)), self.first + i)
            for i, name in enumerate(wanted)
        }


def batch(tags: Sequence[str]) -> Batch:
    return pack(
        [
            make_group(f"g{i}", [make_trajectory([1], [2] * (i + 1))], tag=tag)
            for i, tag in enumerate(tags)
        ]
    )


def filled(passes: Sequence[Pass], made: Batch, **roles: Any) -> Batch:
    algorithm = Algorithm(
        "x", {}, "rows", passes=tuple(passes), roles={p.role: Role() for p in passes}
    )
    return asyncio.run(fill_columns(made, algorithm, roles))


def test_columns_of_one_role_are_computed_together():
    critic = Counter(1.0)
    passes = [
        Pass("critic", "values", "values"),
        Pass("critic", "scores", "bootstrap_values", level="sequence"),
    ]
    found = filled(passes, batch(["", ""]), critic=critic)
    assert [call[0] for call in critic.calls] == [["values", "scores"]]
    assert found.need("values").tolist() == [1.0] * 5
    assert found.need("bootstrap_values").tolist() == [2.0] * 2


def test_a_later_pass_runs_again_after_another_role():
    policy, other = Counter(1.0), Counter(5.0)
    passes = [
        Pass("policy", "logprobs", "a"),
        Pass("other", "logprobs", "b"),
        Pass("policy", "logprobs", "c"),
    ]
    filled(passes, batch([""]), policy=policy, other=other)
    assert len(policy.calls) == 2


def test_teachers_fill_their_own_rows_of_one_column():
    maths, code = Counter(1.0), Counter(2.0)
    passes = [
        Pass("maths", "logprobs", "t", tag="maths"),
        Pass("code", "logprobs", "t", tag="code"),
    ]
    found = filled(passes, batch(["maths", "code", "maths"]), maths=maths, code=code)
    assert found.need("t").tolist() == [1, 1, 2, 2, 2, 1, 1, 1, 1]
    assert maths.calls == [(["logprobs"], 0, ["g0", "g2"])]


def test_a_teacher_without_rows_is_not_asked():
    maths, code = Counter(1.0), Counter(2.0)
    passes = [
        Pass("maths", "logprobs", "t", tag="maths"),
        Pass("code", "logprobs", "t", tag="code"),
    ]
    filled(passes, batch(["maths"]), maths=maths, code=code)
    assert code.calls == []


def test_a_row_that_nobody_teaches_is_refused():
    passes = [
        Pass("maths", "logprobs", "t", tag="maths"),
        Pass("code", "logprobs", "t", tag="code"),
    ]
    with pytest.raises(
        DataError, match=r"has the tag 'art', but t is only filled for code, maths\. Add a teacher"
    ):
        filled(passes, batch(["maths", "art"]), maths=Counter(1.0), code=Counter(2.0))


def test_columns_of_likeliest_tokens_keep_their_width():
    teacher = Counter(3.0)
    passes = [Pass(name, "topk_logprobs", "t", tag=name, top_k=1) for name in ("a", "b")]
    found = filled(passes, batch(["a", "b"]), a=Counter(0.0), b=teacher)
    assert found.need("t").tolist() == [[0, 0]] * 2 + [[3, 3]] * 3
    assert teacher.calls[0][1] == 1


@pytest.mark.parametrize("kind", ["distill_off_policy", "on_policy_distillation"])
@pytest.mark.parametrize("teacher", ["x", {"a": "x", "b": "y"}])
def test_a_step_whose_every_attempt_failed_has_its_columns_and_changes_nothing(
    kind: str, teacher: Any
):
    """Nothing is left of it to ask a teacher about, by tag or not."""
    algo = build(resolve("algorithm", {"kind": kind, "teacher": teacher}))
    config = DecoderConfig(11, 8, 1, 2, 1, 4, 12)
    policy = LocalLearner(
        LocalConfig(), DecoderPolicy(Decoder(config).init_weights(0)), optimizer=OptimizerConfig()
    )
    roles = {"policy": policy} | dict.fromkeys(algo.roles, policy)
    made = algo.advantage(asyncio.run(fill_columns(pack([]), algo, roles)), AlgoState())
    widths = {
        column.shape
        for name, column in made.token_columns.items()
        if name == "teacher_topk_logprobs"
    }
    assert widths <= {(0, 11)}
    assert {"teacher_topk_logprobs", "teacher_logprobs"} & set(made.token_columns)
    for term in algo.losses["policy"]:
        weighed = algo.weigh(made, AlgoState())
        hand = policy.forwards[0]
        loss, _ = term(hand.outputs(weighed, hand.hidden(weighed), term.needs), weighed)
        assert loss.item() == 0
    assert asyncio.run(policy.update(weighed, algo.losses["policy"]))["skipped_empty"] == 1


def test_a_model_that_several_tags_name_is_one_role():
    roles, passes = build_teacher_passes(
        {"maths": "x", "code": "y", "logic": "x"}, {"logprobs": "t"}
    )
    assert {name: role.path for name, role in roles.items()} == {
        "teacher/maths": "x",
        "teacher/code": "y",
    }
    assert [(item.role, item.tag) for item in passes] == [
        ("teacher/maths", "maths"),
        ("teacher/code", "code"),
        ("teacher/maths", "logic"),
    ]


def test_tags_are_taken_as_they_stand():
    """One with a slash, and the tag of tasks without one, in whatever order."""
    roles, passes = build_teacher_passes({"maths/easy": "x", "": "y"}, {"logprobs": "t"})
    assert set(roles) == {"teacher/maths/easy", "teacher"}
    assert [item.tag for item in passes] == ["maths/easy", ""]
    made = {"teacher/maths/easy": Counter(1.0), "teacher": Counter(2.0)}
    algo = Algorithm("x", {}, "rows", passes=passes, roles=roles)
    found = asyncio.run(fill_columns(batch(["", "maths/easy"]), algo, made))  # pyright: ignore[reportArgumentType]
    assert found.need("t").tolist() == [2, 2, 1, 1, 1]


def test_one_teacher_is_for_every_task():
    roles, passes = build_teacher_passes(
        "x", {"topk_ids": "i", "topk_logprobs": "t"}, aligned=True, top_k=3
    )
    assert roles == {"teacher": Role(path="x", aligned=True)}
    assert [(item.output, item.produces, item.tag, item.top_k) for item in passes] == [
        ("topk_ids", "i", None, 3),
        ("topk_logprobs", "t", None, 3),
    ]


# --- between steps


def algorithm(**options: Any) -> Algorithm:
    return build(resolve("algorithm", {"kind": "ppo", **options}))


def test_a_critic_learns_alone_until_it_is_warm():
    algo, state = algorithm(critic={"warmup_steps": 2}), AlgoState()
    updated = []
    for _ in range(4):
        updated.append(list(algo.roles_to_update(state)))
        algo.observe(state, {})
    assert updated == [["critic"], ["critic"], ["policy", "critic"], ["policy", "critic"]]


@pytest.mark.parametrize(("place", "metric"), [("loss", "policy/kl/kl"), ("reward", "batch/kl/kl")])
def test_the_kl_coefficient_follows_what_is_measured(place: str, metric: str):
    algo, state = (
        algorithm(kl={"coef": 0.1, "target": 0.5, "rate": 0.1, "place": place}),
        AlgoState(),
    )
    algo.observe(state, {metric: 5.0})  # ten times the target: the error is cut at 0.2
    assert state.numbers["coef/kl"] == pytest.approx(0.1 * 1.02)
    algo.observe(state, {metric: 0.45})  # 0.45 / 0.5 - 1 = -0.1
    assert state.numbers["coef/kl"] == pytest.approx(0.1 * 1.02 * 0.99)
    algo.observe(state, {"other": 1.0})  # nothing was measured
    assert state.numbers["coef/kl"] == pytest.approx(0.1 * 1.02 * 0.99)
    assert state.step == 3


def test_an_adapted_coefficient_is_the_one_that_weighs():
    algo = algorithm(kl={"coef": 0.1, "target": 0.5})
    made = batch([""])
    made = made.fill_tokens(valued=made.trainable_T)
    assert algo.weigh(made, AlgoState()).weights["kl"].coef == 0.1
    assert algo.weigh(made, AlgoState(numbers={"coef/kl": 0.7})).weights["kl"].coef == 0.7
    assert (
        algo.weigh(made, AlgoState(numbers={"coef/kl": 0.7})).weights["policy_gradient"].coef == 1.0
    )
