import asyncio
from dataclasses import replace

import pytest
import yaml

from ratchet.config.loader import load_config
from ratchet.config.resolve import resolve
from ratchet.errors import ConfigError
from ratchet.testing import answered, check_reward
from ratchet.training.stage_from_config import build_reward
from ratchet.types import Cancelled, Failed, Message, Scored, Task, Truncated, Turn

DOMAINS = {
    "sums": [
        {"kind": "exact_match"},
        {"kind": "length", "weight": 0.5, "unit": "characters", "at_most": 3},
    ],
    "words": [{"kind": "similarity", "threshold": 0.5}],
}


def task(tag: str) -> Task:
    return Task("t/0", (Message("user", "?"),), answer="85", tag=tag)


def made(domains=DOMAINS, **keys):
    return build_reward((resolve("rewards", {"kind": "by_tag", "domains": domains, **keys}),))


def outcome(reward, tag, text, ended=None):
    return asyncio.run(reward.score([answered(task(tag), text, ended)], task(tag)))[0]


def test_each_domain_has_its_own_rewards_and_its_own_names():
    parts = outcome(made(), "sums", "85").parts
    assert parts == {
        "by_tag": 1.5,
        **{f"by_tag/sums/{name}": 1.0 for name in ("exact_match", "length")},
    }
    assert outcome(made(), "words", "85!").parts == {"by_tag": 1.0, "by_tag/words/similarity": 1.0}
    assert outcome(made(weight=2.0), "words", "85!").reward == 2.0
    check_reward(made(), task("sums"), good="85", bad="86")
    check_reward(made(), task("words"), good="85!", bad="no")


def test_a_tag_without_rewards_fails_unless_there_are_some_for_any():
    failed = outcome(made(), "code", "85")
    assert isinstance(failed, Failed)
    assert (
        "task 't/0' has the tag 'code', but there are rewards only for sums, words" in failed.detail
    )
    anything = made({**DOMAINS, "*": [{"kind": "exact_match"}]})
    assert outcome(anything, "code", "85") == Scored(
        1.0, {"by_tag": 1.0, "by_tag/code/exact_match": 1.0}
    )
    for tag in ("code", "sums"):
        assert outcome(made(), tag, "85", Cancelled("stale")) == Cancelled("stale")
        assert outcome(made(), tag, "85", Failed("engine", "gone")).kind == "engine"
    cut = outcome(made(), "sums", "85", Truncated(None))
    assert isinstance(cut, Truncated)
    assert cut.reward == 0.0


def test_a_domain_without_rewards_leaves_its_attempts_to_its_environments_steps():
    reward = made({"puzzle": []})

    def played(*rewards, ended=None):
        turns = tuple(Turn(0, 0, r) for r in rewards)
        (found,) = asyncio.run(
            reward.score(
                [replace(answered(task("puzzle"), "up", ended), turns=turns)], task("puzzle")
            )
        )
        return found

    # to which the turns' own rewards are added
    assert played(0.0, 1.0) == Scored(0.0, {"by_tag": 0.0})
    assert played(None, ended=Truncated(None)) == Truncated(0.0, {"by_tag": 0.0})
    assert (
        "domain 'puzzle' has no rewards, and its environment rewarded no turn"
        in played(None).detail
    )


@pytest.mark.parametrize(
    ("domains", "message"),
    [
        ({}, "at least 1 item"),
        (
            {"a": [{"kind": "length"}, {"kind": "length"}]},
            "domain 'a' has rewards length, length: give each name once",
        ),
        ({"a": [{"kind": "exact_match", "colour": 1}]}, "colour"),
        ({"a": [{"kind": "exact_macth"}]}, "did you mean 'exact_match'"),
    ],
)
def test_domains_that_can_not_be_are_refused(domains, message):
    with pytest.raises((ConfigError, ValueError), match=message):
        resolve("rewards", {"kind": "by_tag", "domains": domains})


def test_a_recipe_with_domains_loads_and_its_dump_loads_again(tmp_path):
    recipe = {
        "model": {"preset": "tiny"},
        "tokenizer": {"kind": "characters"},
        "algorithm": {"kind": "grpo"},
        "environment": {"kind": "arithmetic"},
        "rewards": [
            {
                "kind": "by_tag",
                "domains": {"arithmetic": [{"kind": "numeric_answer", "require_marker": True}]},
            }
        ],
    }
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(recipe))
    first = load_config(tmp_path / "a.yaml", [])
    (inner,) = first.stages[0].rewards[0].domains["arithmetic"]
    assert inner.require_marker
    assert inner.weight == 1.0
    (tmp_path / "b.yaml").write_text(yaml.safe_dump(first.model_dump(mode="json")))
    assert load_config(tmp_path / "b.yaml", []) == first


def test_a_wrong_key_within_a_domain_is_named_with_its_place(tmp_path):
    recipe = {
        "model": {"preset": "tiny"},
        "algorithm": {"kind": "grpo"},
        "environment": {"kind": "arithmetic"},
        "rewards": [
            {
                "kind": "by_tag",
                "domains": {"arithmetic": [{"kind": "numeric_answer", "marker": True}]},
            }
        ],
    }
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(recipe))
    with pytest.raises(ConfigError, match=r"rewards\.0\.domains\.arithmetic\.0\.marker"):
        load_config(tmp_path / "a.yaml", [])
