"""Repetition, unwanted text, and thinking that is judged turn by turn."""

import asyncio
from dataclasses import replace

import pytest

from ratchet.config.resolve import resolve
from ratchet.rewards.answers.format import FormatConfig
from ratchet.rewards.answers.unwanted_text import UnwantedTextConfig
from ratchet.testing import answered, check_reward
from ratchet.testing.builders import make_trajectory
from ratchet.training.stage_from_config import build_reward
from ratchet.types import Failed, Message, Task, ToolCall, Truncated

TASK = Task("t/0", (Message("user", "?"), Message("assistant", "<bad>"), Message("user", "?")))


def made(kind, **keys):
    return build_reward((resolve("rewards", {"kind": kind, **keys}),))


def outcome(reward, trajectory):
    return asyncio.run(reward.score([trajectory], TASK))[0]


def earned(reward, text):
    return outcome(reward, answered(TASK, text)).reward


def written(prompt, completion, *replies):
    """Return an attempt with tokens in which the policy wrote these messages."""
    messages = list(TASK.messages)
    for reply in replies:
        messages += [reply if isinstance(reply, Message) else Message("assistant", reply)]
        messages += [Message("user", "go on")]
    return replace(
        make_trajectory(prompt, completion),
        messages=tuple(messages[:-1]),
        metrics={"turns": float(len(replies))},
    )


# --- repetition


@pytest.mark.parametrize(
    ("text", "ngram", "at_most", "reward"),
    [
        ("a b c d", 1, 0.0, 1.0),
        ("a A a a", 1, 0.0, 0.25),  # three of four have been there
        ("a b a b", 2, 0.0, 2 / 3),  # ab, ba, ab
        ("a b a b", 2, 0.5, 1.0),
        ("a a a a", 1, 0.5, 0.5),
        ("a b a b", 5, 0.0, 1.0),  # too short for one
        ("", 1, 0.0, 1.0),
    ],
)
def test_repetition_of_words_worked_by_hand(text, ngram, at_most, reward):
    judge = made("repetition", unit="words", ngram=ngram, at_most=at_most)
    assert earned(judge, text) == pytest.approx(reward)


def test_repetition_of_tokens_counts_what_the_policy_wrote():
    reward = made("repetition", ngram=2)
    assert outcome(reward, written([1, 2, 1, 2], [1, 2, 3], "x")).reward == 1.0
    assert outcome(reward, written([9], [1, 2, 1, 2], "x")).reward == pytest.approx(2 / 3)
    untokenized = outcome(reward, answered(TASK, "a"))
    assert isinstance(untokenized, Failed)
    assert "set unit to words" in untokenized.detail
    check_reward(made("repetition", unit="words", ngram=1), TASK, good="a b", bad="a a")


# --- unwanted text


def test_unwanted_texts_and_tokens_are_sought_in_every_turn():
    check_reward(made("unwanted_text", texts=["<bad>"]), TASK, good="fine", bad="a <bad> one")
    texts = made("unwanted_text", texts=["<bad>", "no"])
    tokens = made("unwanted_text", token_ids=[7])
    for replies, reward in ((("a", "b"), 1.0), (("a no", "b"), 0.0), (("a", "<bad>"), 0.0)):
        assert outcome(texts, written([7], [8], *replies)).reward == reward
    assert outcome(tokens, written([7], [8, 9], "a")).reward == 1.0, "the prompt may have it"
    assert outcome(tokens, written([1], [8, 7], "a")).reward == 0.0
    untokenized = outcome(tokens, answered(TASK, "a"))
    assert isinstance(untokenized, Failed)
    assert "set texts in place of token_ids" in untokenized.detail
    with pytest.raises(ValueError, match="nothing is unwanted: set texts or token_ids"):
        UnwantedTextConfig()


# --- thinking


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("plan</think>7", 1.0),
        ("<think>plan</think>7", 0.0),
        ("plan 7", 0.0),
        ("plan</think>7</think>", 0.0),
        ("plan</think> ", 0.0),
        ("</think>7", 0.0),
        ("7</think> 7\n", 0.0),  # the answer copies the thinking
        ("", 0.0),
    ],
)
def test_an_answer_must_follow_well_formed_thinking(text, reward):
    judge = made("format", tags=["think"], opened=True, outside="after")
    assert earned(judge, text) == reward


def test_thinking_is_judged_in_every_turn():
    keys = FormatConfig(tags=("think",), outside="after").model_dump() | {"kind": "format"}
    call = ToolCall("1", "add", {})
    good, calls = "<think>a</think>b", Message("assistant", "<think>a</think>", (call,))
    for turns, replies, reward in (
        ("last", ("b", good), 1.0),
        ("all", ("b", good), 0.0),
        ("all", (good, good), 1.0),
        ("all", (calls, good), 1.0),
    ):
        judge = made(**{**keys, "turns": turns})
        assert outcome(judge, written([1], [2], *replies)).reward == reward


@pytest.mark.parametrize(
    "section",
    [
        {"kind": "repetition", "unit": "words"},
        {"kind": "unwanted_text", "texts": ["no"]},
        {"kind": "format", "tags": ["think"], "outside": "after", "turns": "all"},
    ],
    ids=lambda section: section["kind"],
)
def test_an_answer_that_was_cut_off_earns_0(section):
    cut = answered(TASK, "<think>a</think>b", Truncated(None))
    assert outcome(made(**section), cut).reward == 0.0
