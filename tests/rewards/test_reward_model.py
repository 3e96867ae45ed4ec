"""A model with a scalar head as a reward."""

import asyncio
import json
from dataclasses import replace

import pytest
import torch
import yaml

from ratchet.config.model_shape.presets import get_preset
from ratchet.config.resolve import build, resolve
from ratchet.data.chat.builtin_tokenizers import byte_tokenizer, character_tokenizer
from ratchet.data.chat.renderer import Renderer
from ratchet.errors import ModelError
from ratchet.experience.rollout.episode import EpisodePlayer
from ratchet.models.load import init_policy
from ratchet.models.scalar_head import ScalarHead, save_head
from ratchet.protocols import Step
from ratchet.testing import answered, check_reward
from ratchet.testing.fakes import FakeEnvironment, FakeGenerator
from ratchet.training.start import start_run
from ratchet.types import Cancelled, Failed, Message, Sampling, Scored, Task, Truncated

TASK = Task("t/0", (Message("user", "31="),), answer="13")
SHAPE = {
    "hidden_size": 32,
    "n_layers": 1,
    "n_heads": 2,
    "n_kv_heads": 2,
    "intermediate_size": 32,
    "max_positions": 64,
}


def exported(directory, tokenizer, *, head=True):
    model = init_policy(get_preset("tiny", vocab_size=tokenizer.vocab_size, **SHAPE), seed=1)
    model.save(directory)
    tokenizer.save(directory)
    if head:
        save_head(ScalarHead(model.hidden_size).init_weights(2, std=1.0), directory)
    return model


def made(directory, **keys):
    return build(resolve("rewards", {"kind": "reward_model", "path": str(directory), **keys}))


def scores(reward, *texts, ended=None, task=TASK):
    return asyncio.run(reward.score([answered(task, text, ended) for text in texts], task))


def test_the_score_is_the_heads_at_the_end_of_the_conversation_in_the_models_own_words(tmp_path):
    """By hand: one row at a time, with the template and tokenizer of the directory; the
    trajectory's tokens don't enter."""
    tokenizer = byte_tokenizer()
    model = exported(tmp_path, tokenizer)
    head = ScalarHead(32).init_weights(2, std=1.0)

    def by_hand(tokens):
        with torch.no_grad():
            return float(
                head(model.hidden(torch.tensor(tokens), torch.arange(len(tokens)), [len(tokens)]))[
                    -1
                ]
            )

    reward = made(tmp_path, template="turns")
    tokens, _ = Renderer(tokenizer, "turns").supervised(
        (*TASK.messages, Message("assistant", "13é")), train="last"
    )
    (outcome,) = scores(reward, "13é")
    assert outcome.reward == pytest.approx(by_hand(tokens), abs=1e-5)
    assert outcome == Scored(outcome.reward, {"reward_model": outcome.reward})
    (cut,) = scores(reward, "13é", ended=Truncated(None))
    assert isinstance(cut, Truncated)
    assert cut.reward == pytest.approx(by_hand(tokens[:-1]), abs=1e-5)


@pytest.mark.fault("R14")
def test_an_answer_before_the_turn_limit_keeps_its_end(tmp_path):
    """Whether the end of turn is there is what the model wrote, not how the attempt ended."""
    tokenizer = byte_tokenizer()
    exported(tmp_path, tokenizer)
    reward, renderer = made(tmp_path, template="turns"), Renderer(tokenizer, "turns")
    goes_on = FakeEnvironment(lambda task, message: Step((Message("user", "7"),)))
    player = EpisodePlayer(
        FakeGenerator(lambda tokens, sampling: [*answer, renderer.stop_ids[0]]),
        renderer,
        64,
        max_turns=1,
    )

    def judged(max_new_tokens):
        sampling = Sampling(max_new_tokens=max_new_tokens, stop_ids=renderer.stop_ids)
        (row,) = asyncio.run(player.play(TASK, goes_on, sampling, attempt=0))
        assert row.truncated
        (outcome,) = asyncio.run(reward.score([row], TASK))
        return outcome.reward

    answer = tokenizer.encode("13")
    (whole,), (cut,) = scores(reward, "13"), scores(reward, "13", ended=Truncated(None))
    assert judged(3) == pytest.approx(whole.reward, abs=1e-6)
    assert judged(2) == pytest.approx(cut.reward, abs=1e-6)
    assert whole.reward != pytest.approx(cut.reward, abs=1e-3)


def test_batches_change_no_score_and_the_contract_holds(tmp_path):
    exported(tmp_path, character_tokenizer("0123456789="))
    reward = made(tmp_path)
    texts = ["1", "31", "13", "3111", ""]
    together = [outcome.reward for outcome in scores(reward, *texts)]
    assert together == pytest.approx(
        [outcome.reward for outcome in scores(made(tmp_path, batch_tokens=1), *texts)], abs=1e-5
    )
    high, low = sorted((0, 1), key=lambda i: -together[i])
    check_reward(reward, TASK, good=texts[high], bad=texts[low])


def test_what_the_model_can_not_read_fails_alone(tmp_path):
    exported(tmp_path, character_tokenizer("0123456789="))
    group = [answered(TASK, text) for text in ("13", "1" * 80, "thirteen")]
    group += [replace(group[0], messages=TASK.messages), answered(TASK, "13", Cancelled("stale"))]
    fine, long, foreign, silent, stale = asyncio.run(made(tmp_path).score(group, TASK))
    assert isinstance(fine, Scored)
    assert stale == Cancelled("stale")
    for outcome, why in (
        (long, "the reward model reads at most 64"),
        (foreign, "has no token"),
        (silent, "no assistant message"),
    ):
        assert isinstance(outcome, Failed)
        assert why in outcome.detail


def test_a_model_without_a_head_is_refused_at_once(tmp_path):
    exported(tmp_path, character_tokenizer("0123456789="), head=False)
    with pytest.raises(ModelError, match="has no scalar head: train one"):
        made(tmp_path)
    with pytest.raises(ModelError, match="there is no model directory"):
        made(tmp_path / "elsewhere")


@pytest.mark.slow
def test_a_model_that_was_trained_to_prefer_becomes_the_reward_of_grpo(tmp_path, repository):
    """ratchet/recipes/reward_model.yaml, cut short, then a few steps of GRPO that nothing but its score
    judges."""
    small = [
        f"model.overrides.{key}={value}" for key, value in SHAPE.items() if key != "max_positions"
    ]
    quiet = [
        "logging.progress=off",
        "logging.tensorboard=false",
        "evaluation.tasks=16",
        "stages.reward_model.steps=40",
    ]
    quick = ["stages.reward_model.batch_size=32", "environment.digits=2"]
    scorer = tmp_path / "scorer"
    recipe = repository / "ratchet" / "recipes" / "reward_model.yaml"
    assert start_run(recipe, [*small, *quiet, *quick], scorer, command="test") == 0
    rm = {"kind": "reward_model", "path": str(scorer / "model")}
    reward = build(resolve("rewards", rm))
    right, wrong = (outcome.reward for outcome in scores(reward, "13", "77"))
    assert right > wrong
    grpo = {
        "threads": 1,
        "model": {"preset": "tiny", "overrides": SHAPE},
        # other ids than the scorer's
        "tokenizer": {"kind": "characters", "alphabet": "=9876543210"},
        "environment": {"kind": "sorting", "digits": 2},
        "sampling": {"max_new_tokens": 3},
        "algorithm": {"kind": "grpo", "group_size": 4},
        "rewards": [rm],
        "steps": 3,
        "batch_size": 4,
        "evaluation": {"tasks": 8},
        "logging": {"progress": "off", "tensorboard": False},
    }
    (tmp_path / "grpo.yaml").write_text(yaml.safe_dump(grpo))
    assert start_run(tmp_path / "grpo.yaml", [], tmp_path / "run", command="test") == 0
    rows = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    steps = [row for row in rows if "rollout/reward/reward_model" in row]
    assert len(steps) == 3
    assert all(row["rollout/reward_std"] > 0 for row in steps)
    assert not any(row.get("rollout/failed/reward") for row in steps)
