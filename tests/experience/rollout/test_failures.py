import json
import traceback

from ratchet.experience.rollout.failures import describe_failures
from ratchet.types import Failed


def judge():
    json.loads("{")  # fails three frames deeper, in the standard library


def record() -> str:
    try:
        judge()
    except ValueError:
        return traceback.format_exc()
    raise AssertionError


def test_the_most_frequent_failure_names_the_task_and_the_users_line(caplog):
    caplog.set_level("INFO", logger="ratchet")
    whole = f"task qa/3:\n{record()}"
    described = describe_failures([Failed("timeout", "late"), *[Failed("reward", whole)] * 3])
    first, label, place = described.splitlines()
    assert first == "by kind: reward 3, timeout 1; the most frequent (3), reward:"
    assert label == "task qa/3:"
    assert place.startswith("json.decoder.JSONDecodeError: Expecting property name")
    line = judge.__code__.co_firstlineno + 1
    assert place.endswith(f"({__file__}, line {line}, in judge); run.log has the whole traceback")
    assert whole.strip() in caplog.text


def test_a_failure_without_a_traceback_is_described_whole():
    described = describe_failures([Failed("data", "a prompt\nof two lines")])
    assert described.endswith("the most frequent (1), data:\na prompt\nof two lines")
