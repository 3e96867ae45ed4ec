"""The picture of a run is valid XML, and its lines are where the numbers are."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from ratchet.observe import learning_curve
from ratchet.observe.learning_curve import MAX_POINTS, Point, downsample, render_curve, write_curve
from ratchet.observe.sinks import JsonlSink

SVG = "{http://www.w3.org/2000/svg}"


def points(line: ET.Element) -> list[tuple[float, float]]:
    return [
        (float(x), float(y)) for x, y in (pair.split(",") for pair in line.attrib["points"].split())
    ]


def test_a_run_is_drawn(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.write(0, {"eval/accuracy": 0.25})
    for step in range(1, 11):
        sink.write(
            step,
            {
                "rollout/reward": step / 10,
                **({"eval/accuracy": 0.75} if step == 10 else {}),
                "policy/loss": None,
            },
        )
    sink.close()
    assert write_curve(tmp_path / "metrics.jsonl", tmp_path / "curve.svg")
    root = ET.parse(tmp_path / "curve.svg").getroot()
    assert root.tag == f"{SVG}svg"
    reward, accuracy = (points(line) for line in root.iter(f"{SVG}polyline"))
    left, right = learning_curve.LEFT, learning_curve.WIDTH - learning_curve.RIGHT
    top, bottom = learning_curve.TOP, learning_curve.HEIGHT - learning_curve.BOTTOM
    assert accuracy == [
        (left, bottom - 0.25 * (bottom - top)),
        (right, bottom - 0.75 * (bottom - top)),
    ]
    assert len(reward) == 10
    # step 1 of 0..10, the lowest reward
    assert reward[0] == (pytest.approx(left + (right - left) / 10, abs=0.05), bottom)
    assert reward[-1] == (right, top)
    assert len(list(root.iter(f"{SVG}circle"))) == 2
    labels = [text.text for text in root.iter(f"{SVG}text")]
    assert {"mean 1", "greedy 0.75", "step 0", "step 10"} <= set(labels)


def test_light_and_dark() -> None:
    assert "prefers-color-scheme: dark" in render_curve([{"step": 1, "rollout/reward": 0.0}])


@pytest.mark.parametrize("values", [[0.5], [0.5, 0.5], [-3.0, 2.0], [1e-9, 1e9]])
def test_every_coordinate_is_inside(values: list[float]) -> None:
    root = ET.fromstring(
        render_curve([{"step": i, "rollout/reward": value} for i, value in enumerate(values)])
    )
    (line,) = root.iter(f"{SVG}polyline")
    for x, y in points(line):
        assert learning_curve.LEFT <= x <= learning_curve.WIDTH - learning_curve.RIGHT
        assert learning_curve.TOP <= y <= learning_curve.HEIGHT - learning_curve.BOTTOM


def test_two_accuracies_have_two_labels() -> None:
    root = ET.fromstring(render_curve([{"step": 1, "eval/accuracy": 0.5, "eval/sampled": 0.4}]))
    labels = {text.text for text in root.iter(f"{SVG}text")}
    assert {"greedy 0.5", "sampled 0.4"} <= labels
    assert len(list(root.iter(f"{SVG}g"))) == 1  # no panel for what was not measured


def test_nothing_to_draw(tmp_path: Path) -> None:
    assert render_curve([{"step": 1, "policy/loss": 2.0, "rollout/reward": None}]) == ""
    assert not write_curve(tmp_path / "absent.jsonl", tmp_path / "curve.svg")
    assert list(tmp_path.iterdir()) == []


def test_long_runs_are_averaged() -> None:
    thinned = downsample([Point(i, float(i % 3)) for i in range(MAX_POINTS * 3)])
    assert len(thinned) == MAX_POINTS
    assert thinned[0] == (1.0, pytest.approx(1.0))
    assert downsample([Point(1, 2.0), Point(4, 8.0)]) == [(1, 2.0), (4, 8.0)]
