"""A language model of the run as the judge of its attempts."""

import asyncio
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
from rewards.spoken_judge import write_judge

from ratchet.config.resolve import build, resolve
from ratchet.data.render_thread import MAX_LOOP_CHARS
from ratchet.errors import ConfigError, DataError
from ratchet.rewards.judge_models.language_model import LanguageModelJudge
from ratchet.rewards.reward_model import RewardModel, RewardModelConfig
from ratchet.rewards.weighted_sum import compose_rewards
from ratchet.testing import answered, check_reward
from ratchet.training.workers.judges import JudgePlace, start_language_model
from ratchet.types import Failed, Message, Scored, StopReason, Task

TASK = Task("t/0", (Message("user", "37+48="),), answer="85")


def started(directory, seed=0, **keys):
    section = resolve("judge", {"name": "grader", "path": str(directory), **keys})
    return start_language_model(section, JudgePlace(seed, "cpu"))


def asking(judge, kind="judge", **keys):
    section = resolve("rewards", {"kind": kind, "judge": "grader", **keys})
    reward = compose_rewards((section,))
    reward.use_judges({"grader": judge})
    return reward


def outcomes(reward, *texts):
    return asyncio.run(reward.score([answered(TASK, text) for text in texts], TASK))


@pytest.fixture(scope="module")
def spoken(tmp_path_factory):
    return write_judge(tmp_path_factory.mktemp("judge"), choices="2389", max_positions=2048)


def test_the_score_is_what_the_model_says_by_hand(spoken):
    """(2 - 1) / (10 - 1): the first choice at temperature 0, on the scale from 1 to 10."""
    (outcome,) = outcomes(asking(started(spoken)), "85")
    assert outcome == Scored(pytest.approx(1 / 9), {"judge": pytest.approx(1 / 9)})


def test_a_judge_compares_answers_too(tmp_path):
    judge = started(write_judge(tmp_path, "verdict: #", "A"))
    wins = outcomes(asking(judge, "pairwise_judge", both_orders=False), "1", "2")
    # Both places are sorted, so that A is always "1".
    assert [outcome.reward for outcome in wins] == [1.0, 0.0]


@pytest.mark.medium
def test_a_draw_depends_on_the_seed_and_the_question_alone(spoken):
    texts = [str(n) for n in range(12)]

    def draw(seed, *order):
        reward = asking(started(spoken, seed), temperature=1.0)
        return dict(zip(order, [o.reward for o in outcomes(reward, *order)], strict=True))

    first = draw(0, *texts)
    assert len(set(first.values())) > 1
    assert draw(0, *reversed(texts)) == first
    assert draw(0, *texts[4:6]) == {text: first[text] for text in texts[4:6]}
    assert draw(1, *texts) != first


def test_rewards_of_a_run_keep_the_contract_of_rewards(spoken):
    check_reward(asking(started(spoken)), TASK)


@pytest.mark.parametrize(
    ("text", "keys", "message"),
    [
        ("Scor#", {}, "no score"),
        ("Score: #", {"max_tokens": 7}, "cut off after 7 tokens"),
        ("Score: #", {"scale": [1, 5]}, "outside of the scale"),
        ("Score: #", {"prompt": "{response}" * 300}, "context"),
    ],
)
def test_what_the_judge_fails_to_say_fails_the_attempt(tmp_path, text, keys, message):
    judge = started(write_judge(tmp_path, text, "e" if text == "Scor#" else "8"))
    (outcome,) = outcomes(asking(judge, **keys), "85")
    assert isinstance(outcome, Failed)
    assert message in outcome.detail


def test_an_error_of_the_generator_fails_the_attempt_and_ends_the_run(spoken):
    judge = started(spoken)

    class Dead:
        final_error = DataError("gone")

        async def generate(self, tokens, sampling):
            raise self.final_error

    judge.generator = Dead()
    (outcome,) = outcomes(asking(judge), "85")
    assert isinstance(outcome, Failed)
    assert "gone" in outcome.detail
    assert judge.final_error is Dead.final_error


def test_an_aborted_reply_is_no_score(spoken):
    judge = started(spoken)
    whole = judge.generator.generate

    async def generate(tokens, sampling):
        return replace(await whole(tokens, sampling), stop=StopReason.ABORTED)

    judge.generator = SimpleNamespace(generate=generate)
    with pytest.raises(DataError, match="cut off"):
        asyncio.run(judge.reply("?", temperature=0.0, max_tokens=20))


def test_a_judge_that_does_not_run_here_is_named():
    reward = build(resolve("rewards", {"kind": "judge", "judge": "grader"}))
    with pytest.raises(ConfigError, match="judge=grader names a model"):
        reward.use_judges({})
    (outcome,) = outcomes(reward, "85")
    assert "is not running here" in outcome.detail


class Waiting:
    """A renderer and a scorer; the renderer returns once the event loop has run something else."""

    stop_ids = (0,)
    max_positions = 10**6

    def __init__(self):
        self.renderer = self
        self.is_called = threading.Event()
        self.release = threading.Event()

    def prompt(self, messages):
        self.is_called.set()
        assert self.release.wait(10), "rendering blocks the event loop"
        return [1, 2]

    def supervised(self, messages, train):
        return self.prompt(messages), None

    async def score(self, rows):
        assert rows == [[1, 2]]
        raise DataError("rendered")

    async def generate(self, tokens, sampling):
        await self.score([tokens])


@pytest.mark.parametrize("kind", ["judge", "reward_model"])
def test_long_texts_are_rendered_beside_the_event_loop(kind):
    waiting, text = Waiting(), "7" * (MAX_LOOP_CHARS + 1)

    def start():
        if kind == "judge":
            judge = LanguageModelJudge("grader", waiting, waiting, max_context=100, seed=0)
            return judge.reply(text, temperature=0.0, max_tokens=9)
        reward = RewardModel(RewardModelConfig(judge="grader"))
        reward._scorer = waiting
        return reward.score([answered(TASK, text)], TASK)

    async def judge_beside_another():
        judging = asyncio.ensure_future(start())
        while not judging.done():
            if waiting.is_called.is_set():
                waiting.release.set()
            await asyncio.sleep(0)
        return judging.result()

    with pytest.raises(DataError, match="rendered"):
        asyncio.run(judge_beside_another())
