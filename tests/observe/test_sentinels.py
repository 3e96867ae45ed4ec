"""Rules by hand, what is remembered, what is written, and the built-in sentinels one by one."""

import json
import logging
import math
import random
import re
from pathlib import Path
from typing import get_args

import pytest

from ratchet.config.sentinels import Rule, SentinelConfig, SentinelsConfig
from ratchet.errors import link_symptom
from ratchet.observe.sentinels import (
    MAX_EXHIBITS,
    SYMPTOMS,
    Exhibit,
    MetricMemory,
    Sentinels,
    compute_repetition,
    get_active_sentinels,
    measure_repetition,
    update_memory,
)
from ratchet.testing.builders import make_group, make_trajectory


def alarms(
    config: dict, *steps: dict, sentinels: Sentinels | None = None
) -> list[tuple[int, bool]]:
    """(step, whether it pauses) of each alarm."""
    sentinels = sentinels or Sentinels(SentinelsConfig(**config))
    found = []
    for step, metrics in enumerate(steps, start=1):
        before = [record.getMessage() for record in RECORDS]
        pauses = sentinels.check(step, metrics)
        found += [(step, pauses)] * (len(RECORDS) - len(before))
    return found


RECORDS: list[logging.LogRecord] = []


@pytest.fixture(autouse=True)
def told(caplog):
    caplog.set_level(logging.WARNING)
    RECORDS.clear()

    class Keep(logging.Handler):
        def emit(self, record):
            RECORDS.append(record)

    handler = Keep()
    logging.getLogger("ratchet.observe.sentinels").addHandler(handler)
    yield lambda: [record.getMessage() for record in RECORDS]
    logging.getLogger("ratchet.observe.sentinels").removeHandler(handler)


def own(rule, threshold=0.0, **more):
    return {"custom": {"mine": {"metric": "x", "rule": rule, "threshold": threshold, **more}}}


def series(rule, threshold, values, **more):
    """The steps, from 1, at which an alarm is raised."""
    return [
        step
        for step, _ in alarms(own(rule, threshold, **more), *({"x": value} for value in values))
    ]


def test_thresholds():
    assert series("above", 1.0, [0, 1.0, 1.1, 2, 0, 1.5]) == [3, 6]
    assert series("below", 1.0, [1.0, 0.9, 2, 0]) == [2, 4]
    assert series("above", 1.0, [2, 2, 2, 0, 2, 2, 2], patience=2) == [2, 6]


def test_a_spike_is_of_the_windows_own_deviations():
    # median 2.5, absolute deviations 1.5 0.5 0.5 1.5: their median 1.0, times 1.4826
    flat = [1.0, 2.0, 3.0, 4.0]
    edge = 2.5 + 3 * 1.4826
    assert series("spike", 3.0, [*flat, edge + 1e-9], window=4) == [5]
    assert series("spike", 3.0, [*flat, edge - 1e-9], window=4) == []
    assert series("spike", 3.0, [*flat[:3], 1e9], window=4) == [], "the window is not full yet"
    assert series("spike", 3.0, [*flat, -1e9], window=4) == [], "a fall is none"
    assert series("spike", 3.0, [0.0] * 8 + [1e-9], window=4) == [], "rounding is none"


@pytest.mark.medium
def test_a_spike_is_found_in_noise_and_noise_is_none():
    draw = random.Random(0)
    noise = [draw.gauss(0.0, 0.1) for _ in range(2000)]
    default = SentinelsConfig().loss_spike
    assert series("spike", default.threshold, noise, window=default.window) == []
    noise[700] += 5.0
    assert series("spike", default.threshold, noise, window=default.window) == [701]


def test_now_against_first_by_medians():
    assert series("grows", 2.0, [1, 1, 1, 2.1, 2.1, 2.1], window=3) == [6]
    assert series("grows", 2.0, [1, 1, 1, 9, 1, 1, 9, 1], window=3) == [], (
        "single ones are no trend"
    )
    assert series("shrinks", 0.5, [4, 4, 1.9, 1.9], window=2) == [4]
    assert series("rises", 0.1, [0, 0, 0.1, 0.2], window=2) == [4]
    assert series("grows", 2.0, [0, 0, 5, 5], window=2) == [], "0 has no multiples"


def test_numbers_that_are_not_finite():
    assert series("above", 1.0, [0, None]) == [2]
    assert series("below", 1.0, [2, None]) == []
    assert series("nonfinite", 0.0, [0, None, None, 1, None]) == [2, 5]
    assert update_memory(
        SentinelConfig(metric="x", rule="spike", window=2), MetricMemory((1.0,)), None
    ) == MetricMemory((1.0,), (), 1)


def test_a_step_without_the_metric_is_passed_over_but_where_its_absence_says_something():
    steps = [{"x": 2}, {"y": 1}, {"x": 2}]
    assert alarms(own("above", 1.0, patience=2), *steps) == [(3, False)]
    assert alarms(own("reported"), {}, {"x": 3}, {"x": 3}, {}, {"x": 1}) == [(2, False), (5, False)]


def test_a_pattern_stands_for_the_greatest():
    pattern = {"custom": {"mine": {"metric": "x*", "rule": "below", "threshold": 1.0}}}
    assert alarms(pattern, {"x": 0.0, "x/a": 2.0}, {"x": 0.0, "x/a": 0.5}) == [(2, False)]


def test_it_pauses_where_it_is_told_to():
    assert alarms(own("above", 1.0, action="pause"), {"x": 2}, {"x": 2}) == [(1, True)]
    assert alarms(own("above", 1.0, action="off"), {"x": 2}) == []


def test_what_it_remembers_goes_on_bit_by_bit():
    config = own("spike", 3.0, window=5, patience=2)
    draw = random.Random(1)
    steps = [
        {"x": None if i % 9 == 8 else draw.gauss(0, 1) + 20 * (i in (12, 13, 14))}
        for i in range(30)
    ]
    whole = alarms(config, *steps)
    assert whole
    for cut in range(30):
        RECORDS.clear()
        first, second = Sentinels(SentinelsConfig(**config)), Sentinels(SentinelsConfig(**config))
        early = alarms(config, *steps[:cut], sentinels=first)
        second.restore(json.loads(json.dumps(first.state())))
        late = [
            (step + cut, pauses) for step, pauses in alarms(config, *steps[cut:], sentinels=second)
        ]
        assert early + late == whole, cut


def test_the_evidence_is_the_history_and_the_attempts_that_weigh_most(tmp_path, told):
    config = {"length_growth": {"window": 2, "action": "pause"}}
    group = make_group(
        "g", [make_trajectory([1], [2] * n, reward=0.5, attempt=n) for n in range(1, 12)]
    )
    sentinels = Sentinels(SentinelsConfig(**config), tmp_path / "sentinels")
    lengths = [1.0, 1.0, 5.0, 5.0]
    assert [
        sentinels.check(i, {"rollout/length_mean": x, "time/step_s": 1.0}, [group])
        for i, x in enumerate(lengths)
    ][-1]
    path = tmp_path / "sentinels" / "step-00000003-length_growth.json"
    (message,) = told()
    assert message.startswith(
        "step 3: sentinel length_growth: rollout/length_mean = 5 is over 4 times its "
        "first value (medians of"
    )
    assert message.endswith(f"({path})")
    found = json.loads(path.read_text())
    assert (found["history"], found["metrics"]) == (lengths, {"rollout/length_mean": 5.0})
    assert [shown["length"] for shown in found["attempts"]] == list(
        range(11, 11 - MAX_EXHIBITS, -1)
    )
    assert found["attempts"][0]["messages"][-1] == {"role": "assistant", "text": "!"}


def test_evidence_that_somebody_has_comes_first(tmp_path):
    row = make_trajectory([1], [2], reward=1.0)
    sentinels = Sentinels(SentinelsConfig(), tmp_path)
    shown = {"canary/reward": [Exhibit(1.0, make_group("canary/0", [row]), row)]}
    sentinels.check(3, {"canary/reward": 1.0}, [make_group("g", [row])], shown)
    assert (
        json.loads((tmp_path / "step-00000003-canary.json").read_text())["attempts"][0]["group"]
        == "canary/0"
    )


def test_a_full_disk_costs_the_evidence_alone(tmp_path, told):
    (tmp_path / "sentinels").write_text("no directory")
    Sentinels(SentinelsConfig(), tmp_path / "sentinels").check(1, {"canary/reward": 1.0})
    assert "its evidence can't be written" in told()[0]


def test_repetition_by_hand():
    assert compute_repetition(make_trajectory([1], range(20))) == 0.0
    # 13 n-grams, all alike
    assert compute_repetition(make_trajectory([1], [5] * 20)) == pytest.approx(12 / 13)
    assert compute_repetition(make_trajectory([5] * 20, [5] * 7)) is None, (
        "of the policy's own words alone"
    )
    assert measure_repetition([make_trajectory([1], [5]), make_trajectory([1], [5] * 20)]) == {
        "repetition": 12 / 13
    }
    assert measure_repetition([]) == {}


SAME, MIXED = {"reward": 0.0, "reward_std": 0.0}, {"reward": 0.5, "reward_std": 0.5}


def rollouts(*steps, **config):
    named = [{f"rollout/{name}": value for name, value in numbers.items()} for numbers in steps]
    return [step for step, _ in alarms(config, *named)]


@pytest.mark.fault("R6")
def test_identical_rewards_for_as_many_steps_as_are_allowed_are_told_once(told):
    three = {"equal_rewards": {"patience": 3}}
    assert rollouts(SAME, SAME, MIXED, SAME, SAME, **three) == []
    assert rollouts(SAME, SAME, SAME, SAME, **three) == [3]
    assert "equal rewards teach nothing: look at a few answers" in told()[0]
    assert rollouts(SAME, SAME, SAME, MIXED, SAME, SAME, equal_rewards={"patience": 2}) == [2, 6]
    assert rollouts(SAME, {"tokens": 3.0}, SAME, equal_rewards={"patience": 2}) == [3]
    assert rollouts(*[SAME] * 12) == [10], "as it is"


def test_parts_that_differ_teach_though_their_sums_are_equal():
    parts = {**SAME, "reward/a": 0.5, "reward_std/a": 0.5, "reward/b": -0.5, "reward_std/b": 0.5}
    assert rollouts(parts, parts, equal_rewards={"patience": 2}) == []
    assert rollouts(
        *[{**parts, "reward_std/a": 0.0, "reward_std/b": 0.0}] * 2, equal_rewards={"patience": 2}
    ) == [2]


def test_rewards_that_are_not_finite_are_named(told):
    assert rollouts(MIXED, {"reward": 0.5, "reward/math": None, "reward/math/nan": 1.0}) == [2]
    assert told()[0].startswith("step 2: sentinel broken_rewards: rollout/reward/math = not finite")


def test_rewards_that_fail_are_counted_when_it_begins():
    broken = {**MIXED, "failed/reward": 3.0}
    assert rollouts(broken, broken, MIXED, {"failed/reward": 1.0}) == [1, 4]


@pytest.mark.fault("R13")
def test_attempts_that_are_nearly_all_cut_off_are_told():
    assert rollouts(*[{"truncated_share": 1.0}] * 12) == [10]


BUILT_IN = {  # a history that each is for
    "loss_spike": [("policy/loss", [0.1, 0.2] * 16 + [9.0])],
    "nonfinite_step": [("policy/skipped_nonfinite", [0.0, 1.0])],
    "entropy_collapse": [("policy/entropy/entropy", [1.0] * 16 + [0.01] * 16)],
    "kl_blowup": [("policy/kl/kl", [0.1, 2, 2, 2]), ("batch/kl/kl", [math.nan, 2, 2])],
    "policy_jump": [("policy/policy_gradient/old_kl", [0.0, 1, 1, 1])],
    "cut_off": [("rollout/truncated_share", [1.0] * 10)],
    "length_growth": [("rollout/length_mean", [10.0] * 16 + [50.0] * 16)],
    "length_collapse": [("rollout/length_mean", [10.0] * 16 + [1.0] * 16)],
    "repetition": [("rollout/repetition", [0.1, 0.6, 0.6, 0.6])],
    "disagreement": [("second_opinion/disagreement", [0.0, 0.3])],
    "canary": [("canary/reward", [0.0, 0.2])],
    "canary_rise": [("canary/reward", [0.0] * 4 + [0.06] * 4)],
    "equal_rewards": [("rollout/reward_std", [0.0] * 10)],
    "broken_rewards": [("rollout/reward", [1.0, math.nan])],
    "failed_rewards": [("rollout/failed/reward", [0.0, 2.0])],
}


def test_each_built_in_one_says_what_it_is_for(told):
    names = {
        name
        for name, field in SentinelsConfig.model_fields.items()
        if isinstance(field.default, SentinelConfig)
    }
    assert names == set(BUILT_IN)
    for name, histories in BUILT_IN.items():
        for metric, values in histories:
            RECORDS.clear()
            steps = [{metric: None if math.isnan(value) else value} for value in values]
            assert alarms({name: {"action": "pause"}}, *steps)[-1] == (len(values), True), name
            description = SentinelsConfig.describe_field(name)
            assert description
            symptom = SYMPTOMS.get(name)
            link = f". {link_symptom(symptom)}" if symptom else ""
            assert told()[-1].endswith(f"{description}{link}")


def test_what_is_given_of_a_built_in_one_replaces_that_alone():
    config = SentinelsConfig(loss_spike={"action": "pause"})
    assert config.loss_spike == SentinelsConfig().loss_spike.model_copy(update={"action": "pause"})
    assert "length_collapse" not in get_active_sentinels(config)


def test_the_page_has_each():
    page = (Path(__file__).parents[2] / "docs" / "sentinels.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `(\w+)`", page, flags=re.MULTILINE)) == set(BUILT_IN)
    assert set(re.findall(r"`(\w+)`", page.partition("## Rules")[2].partition("## Is")[0])) >= set(
        get_args(Rule)
    )
