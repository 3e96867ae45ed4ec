import json
import traceback

from ratchet.experience.rollout.failures import describe_failures, shorten_traceback
from ratchet.types import Failed


def record(call):
    try:
        call()
    except Exception:
        return traceback.format_exc()
    raise AssertionError


def judge():
    json.loads("{")  # fails three frames deeper, in the standard library


def test_a_traceback_is_shortened_to_the_error_and_the_users_own_line():
    short = shorten_traceback(record(judge)).splitlines()
    assert short[0].startswith("json.decoder.JSONDecodeError: Expecting property name")
    assert short[1] == f"  at {__file__}, line {judge.__code__.co_firstlineno + 1}, in judge"
    assert len(short) == 2


def test_of_a_chain_of_errors_the_last_is_shown():
    def convert():
        try:
            judge()
        except ValueError as error:
            raise KeyError("two\nlines") from error

    short = shorten_traceback(record(convert))
    assert short.startswith("KeyError: 'two\\nlines'")
    assert short.endswith("in convert")


def test_what_is_no_traceback_stays_whole():
    for text in ("", "a sentence", "one\ntwo", "Traceback (most recent call last):\n"):
        assert shorten_traceback(text) == text


def test_the_most_frequent_failure_is_described_and_its_traceback_logged(caplog):
    caplog.set_level("INFO", logger="ratchet")
    whole = record(judge)
    told = describe_failures([Failed("timeout", "late"), *[Failed("reward", whole)] * 3])
    assert told.startswith("by kind: reward 3, timeout 1; the most frequent (3), reward:\njson.")
    assert told.endswith("(run.log has the whole traceback)")
    assert whole.strip() in caplog.text
