"""The log of an evaluation by inspect-ai becomes results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ratchet.errors import DataError
from ratchet.evals.inspect_log import read_inspect_log
from ratchet.evals.results import EvalResults

MODEL = "openai-api/ratchet/policy"


def make_sample(number: int, value: Any, **changes: Any) -> dict[str, Any]:
    return {
        "id": number,
        "epoch": 1,
        "input": f"{number}+1=",
        "target": "x",
        "output": {"choices": [{"message": {"content": "said"}, "stop_reason": "stop"}]},
        "model_usage": {MODEL: {"output_tokens": 3}, "judge": {"output_tokens": 99}},
        "scores": {"first": {"value": value, "answer": "said"}, "second": {"value": 0.125}},
        **changes,
    }


def read(path: Path, samples: list[dict[str, Any]], **config: Any) -> EvalResults:
    evaluation = {
        "task": "pack/sums",
        "config": {"epochs": config.pop("epochs", 1)},
        "packages": {"inspect_ai": "0.3"},
    }
    log = {"eval": evaluation, "plan": {"config": config}, "samples": samples}
    (path / "log.json").write_text(json.dumps(log))
    return read_inspect_log(path / "log.json", MODEL)


def test_scores_are_rewards_and_errors_are_none(tmp_path: Path) -> None:
    cut = {"choices": [{"message": {"content": [{"text": "a"}]}, "stop_reason": "max_tokens"}]}
    messages = [{"role": "system", "content": "Add."}, {"role": "user", "content": "2+2="}]
    values = ["C", "P", "I", "N", True, "yes", "0.25", 7]
    samples = [make_sample(number, value) for number, value in enumerate(values)]
    samples += [
        make_sample(10, "C", output=cut, input=messages),
        make_sample(11, float("nan")),
        make_sample(12, None, scores={}, error={"message": "it broke"}, output={}),
        make_sample(13, "I", limit={"type": "message"}),
    ]
    results = read(tmp_path, samples, temperature=0, max_tokens=8)
    attempts = [prompt.greedy for prompt in results.prompts]
    assert all(attempts)
    assert not results.samples
    rewards = [attempt and attempt.reward for attempt in attempts]
    assert rewards == [1, 0.5, 0, 0, 1, 1, 0.25, 7, 1, None, None, 0]
    ends = [attempt and attempt.end for attempt in attempts[8:]]
    assert ends == ["truncated", "unjudged", "failed", "truncated"]
    assert results.failures == {"unjudged": 1, "inspect": 1}
    assert results.prompts[0].greedy is not None
    assert (results.prompts[0].greedy.text, results.prompts[0].greedy.tokens) == ("said", 3)
    assert [results.prompts[i].prompt for i in (0, 8)] == ["0+1=", "2+2="]
    assert len({prompt.digest for prompt in results.prompts}) == len(results.prompts)
    about = {"on": "inspect:sums", "scorer": "first", "samples": 0, "max_new_tokens": 8}
    assert about.items() <= results.about.items()
    results.write(tmp_path / "results")
    assert EvalResults.read(tmp_path / "results").prompts == results.prompts


def test_epochs_are_sampled_attempts(tmp_path: Path) -> None:
    samples = [
        make_sample(number, "CI"[(number + epoch) % 2], epoch=epoch)
        for epoch in (1, 2)
        for number in (0, 1)
    ]
    results = read(tmp_path, samples, epochs=2, temperature=0)
    assert [[a.reward for a in prompt.sampled] for prompt in results.prompts] == [[0, 1], [1, 0]]
    assert results.accuracy.value == 0.5
    assert {m.name: m.value for m in results.compute_measures()}["pass_at_2"] == 1


@pytest.mark.parametrize("value", [{"a": 1}, "brilliant", float("inf")])
def test_a_score_that_is_no_number_is_named(value: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"scorer first gives .*first scorer give one"):
        read(tmp_path, [make_sample(0, value)])


def test_what_is_no_log_is_refused(tmp_path: Path) -> None:
    (tmp_path / "log.json").write_text('{"eval": []}')
    with pytest.raises(DataError, match="is not a log of inspect-ai"):
        read_inspect_log(tmp_path / "log.json", MODEL)
    with pytest.raises(DataError, match="can't be read"):
        read_inspect_log(tmp_path / "none.json", MODEL)
