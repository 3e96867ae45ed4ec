"""What a step's work was measured to be, on clocks of our own; and in a run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ratchet.config.model_shape.presets import get_preset
from ratchet.learners.compute.flop_counter import FlopCounter
from ratchet.models.flops import DecoderCost
from ratchet.observe.sinks import read_jsonl
from ratchet.observe.tracing.busy_time import BusyTime
from ratchet.testing.builders import make_group, make_trajectory
from ratchet.training.metering import PeakRate, StageMeter
from ratchet.training.start import resume_run, start_run

WORK = DecoderCost(get_preset("tiny", vocab_size=10)).token_cost


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_mfu_and_idle_share_by_hand():
    clock = Clock()
    busy_time, spent = BusyTime(clock), FlopCounter({"policy": WORK})
    meter = StageMeter(spent, PeakRate(1e9), busy_time=busy_time)
    with busy_time:
        clock.now += 100.0
    spent.flop = 5e12  # of the step before
    meter.begin(7)
    with busy_time:
        spent.flop += 1e9
        clock.now += 3.0
    clock.now += 1.0
    groups = [
        make_group(
            "g",
            [
                make_trajectory([1], [2, 3], reward=1.0),
                make_trajectory([1], [2], reward=0.0, attempt=1),
            ],
        )
    ]
    # was sampled in another step
    old = replace(make_group("h", [make_trajectory([1], [2, 3], reward=1.0)]), n_uses=1)
    found = meter.measure([*groups, old], 4.0)
    flop = 1e9 + WORK.forward_flop(3, 2) + WORK.forward_flop(2, 1.5)
    assert found["system"] == {}
    assert found["time"] == pytest.approx(
        {
            "samples_per_s": 0.75,
            "idle_share": 0.25,
            "tflop": flop / 1e12,
            "tflop_per_s": flop / 4e12,
            "mfu": flop / 4e9,
        }
    )


def test_a_peak_that_was_measured_on_a_busy_machine_is_raised():
    clock = Clock()
    rates = iter([2e9, 5e9, 3e9])

    def remeasure() -> float:
        clock.now += 0.01
        return next(rates)

    peak = PeakRate(1e9, is_measured=True, remeasure=remeasure, clock=clock)
    spent = FlopCounter({"policy": WORK})
    meter = StageMeter(spent, peak, busy_time=BusyTime(clock))
    found = []
    for flop in (4e9, 1e9, 1e9):
        meter.begin(0)
        spent.flop += flop
        clock.now += 1.0
        found.append(meter.measure([], 1.0)["time"]["mfu"])
    # 2e9 by the second measurement, and the step was faster; then 5e9; the last is no higher.
    assert found == pytest.approx([1.0, 0.2, 0.2])


def test_repeated_measurements_of_the_peak_take_a_hundredth_of_the_time():
    clock, calls = Clock(), []

    def remeasure() -> float:
        clock.now += 0.01
        calls.append(clock.now)
        return 1e9

    peak = PeakRate(1e9, is_measured=True, remeasure=remeasure, clock=clock)
    while clock.now < 100.0:
        peak.repeat()
        clock.now += 0.1
    assert 90 <= len(calls) <= 100


def test_the_peak_of_a_data_sheet_stays():
    spent = FlopCounter({"policy": WORK})
    meter = StageMeter(spent, PeakRate(1e9), busy_time=BusyTime(Clock()))
    meter.begin(0)
    spent.flop += 2e9
    assert meter.measure([], 1.0)["time"]["mfu"] == pytest.approx(2.0)


def test_a_model_whose_shape_is_unknown_has_no_flop():
    clock = Clock()
    meter = StageMeter(FlopCounter({}), PeakRate(1e9), busy_time=BusyTime(clock))
    meter.begin(0)
    clock.now = 2.0
    found = meter.measure([make_group("g", [make_trajectory([1], [2], reward=1.0)])], 2.0)
    assert found["time"] == {"samples_per_s": 0.5, "idle_share": 1.0}


RECIPE = """
name: metered
threads: 1
model: {preset: tiny, overrides: {hidden_size: 32, n_layers: 1}}
tokenizer: {kind: characters, alphabet: "0123456789="}
environment: {kind: sorting, digits: 2}
sampling: {max_new_tokens: 3}
evaluation: {tasks: 2, every: 1}
algorithm: {kind: grpo, group_size: 2}
steps: 2
batch_size: 2
checkpoint: {every: 1}
logging: {progress: "off", tensorboard: false}
"""


@pytest.mark.slow
def test_a_run_measures_itself_and_its_resumption_goes_on(tmp_path: Path):
    recipe, path = tmp_path / "recipe.yaml", tmp_path / "run"
    recipe.write_text(RECIPE)
    assert start_run(recipe, [], path, command="") == 0
    assert resume_run(path, command="") == 0
    rows = read_jsonl(path / "metrics.jsonl")[1:]
    for row in rows:
        assert 0 <= row["time/idle_share"] < 1
        assert row["time/mfu"] > 0
        assert row["time/tflop_per_s"] == pytest.approx(row["time/tflop"] / row["time/step_s"])
        assert {"system/cpu_cores", "system/disk_free_gib"} <= row.keys()
    events = json.loads((path / "trace.json").read_text())
    names = [event["name"] for event in events if event["ph"] == "X"]
    assert [name for name in names if name.startswith("step")] == ["step 1", "step 2"]
    assert {"sample", "score", "update", "sync", "after", "evaluate", "save"} <= set(names)
    # attempts of both steps, and evaluated ones
    assert sum(event["ph"] == "b" for event in events) == 2 * (2 * 2) + 2 * 2
    tracks = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert tracks == {"steps", "policy"}


@pytest.mark.medium
def test_what_is_not_wanted_is_left_out(tmp_path: Path):
    recipe, path = tmp_path / "recipe.yaml", tmp_path / "run"
    recipe.write_text(RECIPE)
    assert start_run(recipe, ["logging.trace=false", "logging.system=false"], path, command="") == 0
    assert not (path / "trace.json").exists()
    assert not [
        name
        for row in read_jsonl(path / "metrics.jsonl")
        for name in row
        if name.startswith("system/")
    ]
