"""Judges that are asked over HTTP, against a server of our own."""

import asyncio
import errno
import gzip
import os
import re

import pytest
from rewards.fake_http import HANG, Answer, chat, serve

from ratchet.config.resolve import build, resolve
from ratchet.errors import ConfigError, DataError
from ratchet.rewards.llm.chat_client import fill_template
from ratchet.rewards.llm.http_client import RateLimit
from ratchet.rewards.llm.verdicts import parse_score, parse_verdict, parse_yes_no
from ratchet.rewards.weighted_sum import compose_rewards
from ratchet.testing import answered, check_reward
from ratchet.types import Cancelled, Failed, Message, Scored, Task, Truncated
from ratchet.utils import credentials

TASK = Task("t/0", (Message("user", "37+48="),), answer="85")


def made(kind, fake, **keys):
    keys = {"url": f"{fake.url}/v1", "model": "m", "backoff_s": 1e-3, **keys}
    return build(resolve("rewards", {"kind": kind, **keys}))


def scores(reward, *texts, task=TASK, ended=None):
    return asyncio.run(reward.score([answered(task, text, ended) for text in texts], task))


def response_in(body):
    (found,) = re.findall(
        r"<response>\n(.*?)\n</response>", body["messages"][0]["content"], re.DOTALL
    )
    return found


def rates(body, number=0):
    return chat(f"Let me see. Score: {10 if response_in(body) == '85' else 4}")


# --- replies


@pytest.mark.parametrize(
    ("reply", "score"),
    [
        ("Score: 7", 7.0),
        ("a score of 2 would be bad.\n**Score:** 8.5", 8.5),
        ('```json\n{"why": "fine", "score": 3}\n```', 3.0),
        ("Score: 7/10", 7.0),
        ("Score: 7 out of 10.", 7.0),
        ("Score: 7 (out of 10)", 7.0),
        ("Score: -1", None),
        ("Score: 11", None),
        ("Score: N", None),
        ("Score: .5", 0.5),
        ("Score: 7, as it is right", 7.0),
        ('{"score":7,"why":"right"}', 7.0),
        ("Score: 7\u2014right", 7.0),
        ("<think>Score: 9?</think>\nScore: 3", 3.0),
        # More than one plain number of the scale is no score.
        ("Score: 7/100", None),
        ("Score: 4 (out of 5)", None),
        ("Score: 7,5", None),
        ("Score: 5-10", None),
        ("Score: \u22125", None),
        ("Score: \u20135", None),
        ("Score: 5%", None),
        ("Score: 5 %", None),
        ("Score: 7 or 8", None),
        ("Score: 1 0", None),
        ("Score: 7 / 10", 7.0),
        ("Score (0 to 10): 7", 7.0),
        ("**Score (0-10):** 7/10", 7.0),
        ("Score (7)", 7.0),
        ("Score (0 to 10): good", None),
        ("Score: \u0663", None),
        ("Score: 1e1", None),
        ("Score: 5 - good work", 5.0),
        ("Score: 5 - 10", None),
        ("Score: 5 \u2013 10", None),
        ("**Score:** **5** - **10**", None),
        ("Score: 5 \u2192 7", None),
        ("Score: 3 + 4 = 7", None),
        ("Score: 5 and 7", None),
        ('{"score": [5, 7]}', None),
        ("Score: 7, 3 points were lost", 7.0),
        ("Score: 7\n- 3 errors", 7.0),
        ("| Score: 7 | Style: 3 |", 7.0),
        ("Score: \u22645", None),
        ("Score: 7 \u00bd", None),
        # The highest score is that of the scale, however it is written.
        ("**Score: 5**/10", 5.0),
        ("Score: **5**/5", None),
        ("Score: 8 of 10", 8.0),
        ("Score: 4 stars out of 5", None),
        ("Score: 4 out of five", None),
        ("Score: 4\u20445", None),
        ("Score (1-5): 4", None),
        ("Score: 3 is low.\nFinal score: unknown", None),
        ("Score: 3 is low. Score: ?", None),
        ("Score: 3 is low. Score: N/A", None),
        ("Score: 3 is low. Score: NaN", None),
        # Another score, or a bound, is not the score.
        ('{"score": 3, "max_score": 10}', 3.0),
        ('{"score": 3, "style_score": 10}', 3.0),
        ('{"final_score": 3, "maxScore": 10}', 3.0),
        ("Score: 3 (maximum possible score: 10)", 3.0),
        ("The max score is 10.", None),
        ("<think>Score: 9", None),
        ("<think>Score: 9</think>", None),
        ("seven", None),
        ("", None),
    ],
)
def test_the_last_score_of_a_reply_counts_if_the_scale_has_it(reply, score):
    if score is None:
        with pytest.raises(DataError, match="the judge's"):
            parse_score(reply, 0.0, 10.0)
    else:
        assert parse_score(reply, 0.0, 10.0) == score


@pytest.mark.parametrize(
    ("reply", "win"),
    [
        ("Better: A", 1.0),
        ("A seems better. Better: B", 0.0),
        ("**Better:** tie", 0.5),
        ("My verdict: [[A]]", 1.0),
        ("[[C]]", 0.5),
        ('{"winner": "B"}', 0.0),
        ("Better: a tie", 0.5),
        ("B is better. A fails. Better: b", 0.0),
        ("Better: A, B is wrong", 1.0),
        ("B is better. A fails.", None),
        ("Better: B at first. Better: A and B", None),
        ("Better: a bit of both", None),
        ("Better: A at first. On reflection, better: neither", None),
        ("Better: A = B", None),
        ("Better: A (tie)", None),
        ("[[A]] or [[B]]", None),
        ("both are fine", None),
        ("Better: Apples", None),
    ],
)
def test_the_last_verdict_of_a_reply_counts(reply, win):
    if win is None:
        with pytest.raises(DataError, match="no verdict"):
            parse_verdict(reply)
    else:
        assert parse_verdict(reply) == win


@pytest.mark.parametrize(
    ("reply", "verdict"),
    [
        ("YES. There is no error.", 1.0),
        ("YES\n\nNote: no reference was given.", 1.0),
        ("NO: it is not a yes.", 0.0),
        ("Is it YES or NO? YES", 1.0),
        ("No. It should be 85.", 0.0),
        ("Yes and no. NO", 0.0),
        ("NO, though it would be YES if it had 85.", None),
        ("It is neither YES nor NO.", None),
        ("YES and NO", None),
        ("I can't say YES.", None),
        ("I cannot give a NO. YES", 1.0),
        ("The response has no errors.", None),
        ("Yes. Then again, no, it depends.", None),
    ],
)
def test_a_remark_is_no_verdict_of_yes_or_no(reply, verdict):
    if verdict is None:
        with pytest.raises(DataError, match="the judge's reply holds"):
            parse_yes_no(reply)
    else:
        assert parse_yes_no(reply) == verdict


def test_a_verdict_of_yes_or_no_is_the_last_of_the_reply() -> None:
    with serve(
        lambda body, number: chat(
            f"Yes... {response_in(body)}, so **{'YES' if '85' in response_in(body) else 'NO'}**."
        )
    ) as fake:
        reward = made("judge", fake, verdict="yes_no", rubric="Is it 85?")
        assert [outcome.reward for outcome in scores(reward, "85", "86")] == [1.0, 0.0]
        assert "the single word YES or NO" in fake.seen[0][2]["messages"][0]["content"]
    with serve(lambda body, number: chat("Yesterday, nobody.")) as fake:
        (outcome,) = scores(made("judge", fake, verdict="yes_no"), "85")
        assert "neither YES nor NO" in outcome.detail
    with pytest.raises(ValueError, match="remove scale"):
        made("judge", fake, verdict="yes_no", scale=[1, 5])


def test_what_an_answer_says_is_never_filled_in_twice():
    assert fill_template("{a} {b} {c}", {"a": "{b}", "b": "x"}) == "{b} x {c}"


def test_requests_are_spaced_evenly():
    pace = RateLimit(120.0)
    assert [
        pace.reserve_start(10.0),
        pace.reserve_start(10.0),
        pace.reserve_start(10.25),
        pace.reserve_start(20.0),
    ] == [
        0.0,
        0.5,
        0.75,
        0.0,
    ]
    assert RateLimit(None).reserve_start(3.0) == 0.0


# --- a score by a rubric


def test_a_judge_gives_its_score_as_a_share_of_the_scale_and_keeps_the_contract():
    with serve(rates) as fake:
        reward = made("judge", fake, rubric="Is it right?")
        assert scores(reward, "85", "86") == [
            Scored(1.0, {"judge": 1.0}),
            Scored(3 / 9, {"judge": 3 / 9}),
        ]
        check_reward(reward, TASK, good="85", bad="86")
        assert len(fake.seen) == 3  # "85", "86" and "": each is asked once
        path, headers, body = fake.seen[0]
        assert (path, body["model"], body["temperature"], body["max_tokens"]) == (
            "/v1/chat/completions",
            "m",
            0.0,
            512,
        )
        assert "authorization" not in headers
        text = body["messages"][0]["content"]
        for piece in (
            "Is it right?",
            "<request>\n37+48=\n</request>",
            "<reference>\n85\n</reference>",
            "from 1 (worst) to 10",
        ):
            assert piece in text
        assert scores(reward, "85", ended=Truncated(None)) == [Truncated(0.0, {"judge": 0.0})]
        assert scores(reward, "85", ended=Cancelled("stale")) == [Cancelled("stale")]


def test_equal_answers_are_one_question_while_it_is_under_way_and_a_cache_outlives_the_run(
    tmp_path,
):
    with serve(rates) as fake:
        assert [
            o.reward
            for o in scores(made("judge", fake, cache=str(tmp_path)), "85", "85", "1", "85")
        ] == [1, 1, 3 / 9, 1]
        assert len(fake.seen) == 2
        again = made("judge", fake, cache=str(tmp_path))
        assert [o.reward for o in scores(again, "85", "1")] == [1, 3 / 9]
        assert len(fake.seen) == 2
        assert len(list(tmp_path.rglob("*.json"))) == 2
        scores(made("judge", fake, cache=str(tmp_path), temperature=0.5), "85")
        assert len(fake.seen) == 3  # another question


def test_a_reply_without_a_verdict_is_not_kept(tmp_path):
    replies = ["I can't say.", "Score: 4", *["Score: 10"] * 5]
    with serve(lambda body, number: chat(replies[number])) as fake:
        reward = made("judge", fake, cache=str(tmp_path))
        assert isinstance(scores(reward, "85")[0], Failed)
        assert list(tmp_path.rglob("*.json")) == []
        assert scores(reward, "85")[0].reward == 3 / 9
        (kept,) = tmp_path.rglob("*.json")
        whole = b'{"reply": "Score: 10"}'
        # The fourth is cut off where it would still be a score.
        for damage in (b"", b'{"reply": "no verdict"}', b"\xff", whole[:-3], b"[]"):
            kept.write_bytes(damage)
            assert scores(made("judge", fake, cache=str(tmp_path)), "85")[0].reward == 1
            assert kept.read_bytes() == whole


def test_a_cache_that_cannot_be_used_costs_no_verdict(tmp_path, monkeypatch, caplog):
    def fail(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with serve(rates) as fake:
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", fail)
            reward = made("judge", fake, cache=str(tmp_path / "full"))
            assert [o.reward for o in scores(reward, "85", "1", "85")] == [1, 3 / 9, 1]
        assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
        (tmp_path / "file").touch()
        reward = made("judge", fake, cache=str(tmp_path / "file"))
        assert [o.reward for o in scores(reward, "85", "1")] == [1, 3 / 9]
        assert len(fake.seen) == 4
    assert [record.message.split(" can't")[0] for record in caplog.records] == [
        f"cache={tmp_path / name}" for name in ("full", "file")
    ]


def test_a_key_comes_from_the_named_variable_and_stands_in_no_file():
    with serve(rates) as fake:
        credentials.set_environment({"MY_KEY": "s3cret"})
        try:
            scores(made("judge", fake, api_key_env="MY_KEY"), "85")
            with pytest.raises(ConfigError, match="environment variable OTHER_KEY is not set"):
                made("judge", fake, api_key_env="OTHER_KEY")
        finally:
            credentials.set_environment({})
        assert fake.seen[0][1]["authorization"] == "Bearer s3cret"


@pytest.mark.medium
def test_what_may_pass_is_tried_again():
    trouble = [Answer("slow down", 429, {"retry-after": "0"}), Answer("oops", 500), "<html>", HANG]

    def answer(body, number):
        return trouble[number] if number < len(trouble) else rates(body)

    with serve(answer) as fake:
        assert scores(made("judge", fake, timeout_s=1.0), "85") == [Scored(1.0, {"judge": 1.0})]
        assert len(fake.seen) == 5


@pytest.mark.medium
@pytest.mark.parametrize(
    ("given", "keys", "requests", "why"),
    [
        (
            Answer("busy", 503),
            {"retries": 2},
            3,
            "gave no usable response in 3 tries; the last failed with status 503: busy",
        ),
        (HANG, {"retries": 1, "timeout_s": 0.5}, 2, "no answer within 0.5 s"),
        ("[" * 100_000, {"retries": 1}, 2, "the last failed with no JSON"),
        (
            Answer("no gzip", headers={"content-encoding": "gzip"}),
            {"retries": 1},
            2,
            "gzip body is damaged",
        ),
        (
            Answer(gzip.compress(b" " * (65 << 20), 1), headers={"content-encoding": "gzip"}),
            {"retries": 1},
            2,
            "the last failed with an answer of more than 67108864 bytes",
        ),
        (Answer("no such model", 404), {}, 1, "refused with status 404: no such model"),
        ({"error": "x"}, {}, 1, "answered without a message"),
        (chat(None), {}, 1, "answered without a message"),
        (chat("I can't say."), {}, 1, "holds no score"),
        (chat("Score: 99"), {}, 1, "lies outside of the scale 1 to 10"),
        (chat("Score: 1", finish_reason="length"), {}, 1, "did not finish its reply"),
        (chat("Score: 9", finish_reason="content_filter"), {}, 1, "finish_reason=content_filter"),
    ],
)
def test_what_can_not_be_judged_is_failed_and_never_zero(given, keys, requests, why):
    with serve(lambda body, number: given) as fake:
        (outcome,) = scores(made("judge", fake, **keys), "85")
        assert isinstance(outcome, Failed)
        assert outcome.kind == "reward"
        assert why in outcome.detail
        assert len(fake.seen) == requests


def test_nobody_there_is_failed():
    with serve(rates) as fake:
        reward = made("judge", fake, retries=1)
    (outcome,) = scores(reward, "85")
    assert isinstance(outcome, Failed)
    assert "ConnectError" in outcome.detail


def test_so_many_requests_run_at_once_and_no_more():
    with serve(rates) as fake:
        scores(made("judge", fake, concurrency=2), *map(str, range(12)))
        assert len(fake.seen) == 12
        assert fake.most_at_once <= 2


def test_a_long_answer_is_cut_in_its_middle_and_a_conversation_keeps_its_roles():
    task = Task("t/1", (Message("system", "Be kind."), Message("user", "hi")))
    with serve(lambda body, number: chat("Score: 1")) as fake:
        scores(made("judge", fake, max_chars=10), "a" * 50 + "b" * 50, task=task)
        assert response_in(fake.seen[0][2]) == "aaaaa\n[...]\nbbbbb"
        assert (
            "<request>\n[system]\nBe kind.\n\n[user]\nhi\n</request>"
            in fake.seen[0][2]["messages"][0]["content"]
        )


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"url": "localhost:1"}, "must begin with http:// or https://"),
        ({"scale": [3, 3]}, "must rise"),
        ({"prompt": "Rate it."}, r"prompt lacks \{response\}"),
        ({"api_key_env": "sk-123"}, "api_key_env"),
        ({"retries": -1}, "retries"),
    ],
)
def test_settings_that_can_not_be_are_refused(keys, message):
    with pytest.raises(ValueError, match=message):
        resolve("rewards", {"kind": "judge", "url": "http://x/v1", "model": "m", **keys})
    with pytest.raises(ValueError, match=r"prompt lacks \{second\}"):
        resolve(
            "rewards",
            {"kind": "pairwise_judge", "url": "http://x/v1", "model": "m", "prompt": "{first}"},
        )


# --- against each other


def longer_wins(body, number=0):
    a, b = re.findall(
        r"<response_.>\n(.*?)\n</response_.>", body["messages"][0]["content"], re.DOTALL
    )
    return chat("Better: tie" if len(a) == len(b) else f"Better: {'A' if len(a) > len(b) else 'B'}")


@pytest.mark.medium
def test_the_reward_is_the_share_of_comparisons_won():
    with serve(longer_wins) as fake:
        reward = made("pairwise_judge", fake)
        assert [o.reward for o in scores(reward, "aaa", "bb", "cc", "d")] == [1.0, 0.5, 0.5, 0.0]
        assert len(fake.seen) == 12  # six pairs, in both orders
        assert [o.reward for o in scores(reward, "aaa", "aaa", "d")] == [0.75, 0.75, 0.0]
        assert len(fake.seen) == 12  # all known
        assert scores(reward, "alone") == [Scored(0.5, {"pairwise_judge": 0.5})]
        check_reward(reward, TASK, good="long", bad="s")


def test_a_judge_that_always_prefers_one_place_makes_a_tie():
    with serve(lambda body, number: chat("Better: A")) as fake:
        assert [o.reward for o in scores(made("pairwise_judge", fake), "x", "y")] == [0.5, 0.5]
        assert [
            o.reward for o in scores(made("pairwise_judge", fake, both_orders=False), "y", "x")
        ] == [0.0, 1.0]


def test_answers_can_be_compared_with_the_tasks_own():
    with serve(longer_wins) as fake:
        reward = made("pairwise_judge", fake, against="answer")
        assert [o.reward for o in scores(reward, "123", "1", "85", "86")] == [1.0, 0.0, 0.5, 0.5]
        (outcome,) = scores(reward, "1", task=Task("t/2", TASK.messages))
        assert "has no answer to compare with" in outcome.detail


def test_a_comparison_that_can_not_be_made_fails_both_attempts_and_no_others():
    def answer(body, number):
        text = body["messages"][0]["content"]
        return chat("?") if "\nx\n" in text and "\nyy\n" in text else longer_wins(body)

    with serve(answer) as fake:
        x, y, z = scores(made("pairwise_judge", fake), "x", "yy", "zzz")
        assert isinstance(x, Failed)
        assert isinstance(y, Failed)
        assert "no verdict" in y.detail
        assert z == Scored(1.0, {"pairwise_judge": 1.0})
        cut = [
            answered(TASK, "x", Truncated(None)),
            answered(TASK, "zzz"),
            answered(TASK, "y", Failed("engine")),
        ]
        outcomes = asyncio.run(made("pairwise_judge", fake).score(cut, TASK))
        assert [type(o) for o in outcomes] == [Truncated, Scored, Failed]
        assert [o.reward for o in outcomes[:2]] == [0.0, 0.5]


# --- a remote reward


@pytest.mark.slow
def test_a_group_goes_out_in_one_request_and_comes_back_with_parts():
    def answer(body, number):
        return {"results": [_judged(row) for row in body["rows"]]}

    def _judged(row):
        return {
            "reward": float(row["response"] == row["answer"]),
            "parts": {"length": len(row["response"])},
        }

    task = Task("t/3", TASK.messages, answer="85", tag="sums", meta={"level": 3})
    with serve(answer) as fake:
        reward = build(resolve("rewards", {"kind": "remote", "url": fake.url}))
        assert scores(reward, "85", "860", task=task) == [
            Scored(1.0, {"length": 2.0}),
            Scored(0.0, {"length": 3.0}),
        ]
        (row, _) = fake.seen[0][2]["rows"]
        assert row == {
            "prompt": "37+48=", "response": "85", "answer": "85", "meta": {"level": 3}, "tag": "sums", "truncated": False,
            "messages": [{"role": "user", "content": "37+48="}, {"role": "assistant", "content": "85"}],
        }  # fmt: skip
        assert len(fake.seen) == 1
        check_reward(reward, TASK, good="85", bad="86")
        assert isinstance(scores(reward, "85", ended=Truncated(None))[0], Truncated)
        assert fake.seen[-1][2]["rows"][0]["truncated"]


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ([], 'must answer {"results"'),
        ({"results": [{"reward": 1.0}]}, "with 2 results"),
        (Answer("gone", 410), "status 410"),
        (Answer("busy", 500), "in 2 tries"),
        ("not JSON", "no JSON: 'not JSON'"),
    ],
)
def test_an_answer_that_fits_no_group_fails_all_of_it(given, why):
    with serve(lambda body, number: given) as fake:
        reward = build(
            resolve("rewards", {"kind": "remote", "url": fake.url, "retries": 1, "backoff_s": 1e-3})
        )
        for outcome in scores(reward, "85", "86"):
            assert isinstance(outcome, Failed)
            assert why in outcome.detail


def test_a_result_that_is_no_reward_fails_its_own_attempt():
    results = [
        {"reward": 2},
        {"error": "no such problem"},
        {"reward": True},
        {"reward": None},
        {"reward": 1.0, "parts": {"x": "y"}},
        7,
        {"reward": 10**400},
        {"reward": 3, "error": None},
    ]
    with serve(lambda body, number: {"results": results}) as fake:
        outcomes = scores(
            build(resolve("rewards", {"kind": "remote", "url": fake.url})), *"abcdefgh"
        )
        assert outcomes[0] == Scored(2.0, {"remote": 2.0})
        assert [type(o) for o in outcomes[1:-1]] == [Failed] * 6
        assert outcomes[-1] == Scored(3.0, {"remote": 3.0})
        assert "no such problem" in outcomes[1].detail


def test_they_compose_with_the_others():
    with serve(rates) as fake:
        sections = (
            resolve("rewards", {"kind": "exact_match"}),
            resolve("rewards", {"kind": "judge", "url": fake.url, "model": "m", "weight": 0.5}),
        )
        (outcome,) = scores(compose_rewards(sections), "85")
        assert outcome == Scored(1.5, {"exact_match": 1.0, "judge": 1.0})
