"""Several environments in one run, each with its share of the prompts and its own rewards."""

import asyncio
import copy
import itertools
import json
from collections import Counter
from fractions import Fraction

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from ratchet.config.loader import load_config
from ratchet.config.resolve import build, resolve
from ratchet.environments.mixture import locate_task
from ratchet.errors import ConfigError, DataError
from ratchet.rewards.weighted_sum import compose_rewards
from ratchet.testing import check_environment
from ratchet.training.start import start_run
from ratchet.types import Message

PARTS = [
    {"kind": "sorting", "digits": 3, "weight": 3},
    {"kind": "arithmetic", "digits": 2},
    {"kind": "arithmetic", "digits": 1, "operators": ["-"], "tag": "minus", "weight": 0.5},
]


def made(parts=PARTS):
    return build(resolve("environment", {"kind": "mixture", "parts": parts}))


def test_positions_are_shared_out_by_hand():
    shares = [Fraction(2), Fraction(1), Fraction(1)]
    assert [locate_task(i, shares) for i in range(8)] == [
        (0, 0),
        (1, 0),
        (0, 1),
        (2, 0),
        (0, 2),
        (1, 1),
        (0, 3),
        (2, 1),
    ]
    assert [locate_task(i, [Fraction(1)]) for i in range(3)] == [(0, 0), (0, 1), (0, 2)]


@given(
    shares=st.lists(
        st.fractions(min_value="1/20", max_value=20, max_denominator=20), min_size=1, max_size=5
    )
)
def test_every_part_keeps_its_share_and_misses_none_of_its_tasks(shares):
    counts = Counter()
    for position in range(120):
        part, index = locate_task(position, shares)
        assert index == counts[part]
        counts[part] += 1
        for i, share in enumerate(shares):
            assert abs(counts[i] - (position + 1) * share / sum(shares)) <= 1 + i


def test_tasks_carry_their_parts_tag_and_come_by_its_share():
    tasks = list(itertools.islice(made().tasks("train", seed=0), 90))
    assert Counter(task.tag for task in tasks) == {"sorting": 60, "arithmetic": 20, "minus": 10}
    assert tasks[0].id == "sorting:sorting/train/0"
    assert next(task.id for task in tasks if task.tag == "minus") == "minus:arithmetic/train/0"
    later = made().tasks("train", seed=0, start=37)
    assert list(itertools.islice(later, 53)) == tasks[37:]


@pytest.mark.slow
def test_the_kit_with_the_rewards_of_each_part():
    section = resolve("environment", {"kind": "mixture", "parts": PARTS})
    own = resolve("rewards", section.default_reward)
    check_environment(build(section), reward=compose_rewards((own,)))


@pytest.mark.medium
def test_a_part_that_runs_out_of_test_tasks_leaves_the_rest_to_the_others():
    """One digit minus one digit: 100 prompts, of which about ten are held out."""
    tags = [task.tag for task in itertools.islice(made().tasks("test", seed=0), 300)]
    few = tags.count("minus")
    assert 5 <= few <= 20
    assert len(tags) == 300
    assert "minus" not in tags[200:]


def test_attempts_that_run_at_once_do_not_share_their_parts():
    async def both():
        one = made([{"kind": "number_guessing"}, {"kind": "sorting"}])
        other = copy.copy(one)
        tasks = [
            task
            for task in itertools.islice(one.tasks("train", seed=0), 8)
            if task.tag == "number_guessing"
        ]
        await one.reset(tasks[0])
        await other.reset(tasks[1])
        assert one._current_part is not other._current_part
        await one.close()
        return await other.step(Message("assistant", "1"))

    assert asyncio.run(both()) is not None


def test_what_can_not_be_is_refused():
    with pytest.raises(
        (ConfigError, ValueError), match=r"two parts have the tag 'sorting'.*such as sorting_2"
    ):
        resolve(
            "environment",
            {"kind": "mixture", "parts": [{"kind": "sorting"}, {"kind": "sorting", "digits": 4}]},
        )
    for parts, message in (
        ([], "at least 1 item"),
        ([{"kind": "mixture", "parts": []}], "'mixture' is unknown"),
        ([{"kind": "sorting", "weight": 0}], "greater than 0"),
        ([{"kind": "sorting", "digit": 0}], "digit"),
    ):
        with pytest.raises((ConfigError, ValueError), match=message):
            resolve("environment", {"kind": "mixture", "parts": parts})
    with pytest.raises(DataError, match="the mixture's parts are sorting"):
        asyncio.run(made(PARTS[:1]).reset(next(iter(made(PARTS[1:]).tasks("train", seed=0)))))


def test_what_the_parts_have_in_common_is_what_a_mixture_gives(tmp_path):
    section = resolve(
        "environment", {"kind": "mixture", "parts": [{"kind": "sorting"}, {"kind": "countdown"}]}
    )
    assert section.data_kinds == {"rows", "rollouts"}
    assert section.returns_rewards
    assert section.default_reward == {
        "kind": "by_tag",
        "domains": {"sorting": [{"kind": "exact_match"}], "countdown": [{"kind": "countdown"}]},
    }
    recipe = {
        "model": {"preset": "tiny"},
        "tokenizer": {"kind": "characters"},
        "algorithm": {"kind": "dpo"},
    }
    recipe["environment"] = {
        "kind": "mixture",
        "parts": [{"kind": "sorting"}, {"kind": "countdown"}],
    }
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(recipe))
    with pytest.raises(
        ConfigError, match="learns from pairs, which environment mixture doesn't have"
    ):
        load_config(tmp_path / "a.yaml")


@pytest.mark.slow
def test_a_recipe_trains_on_two_domains_with_a_curve_of_each(tmp_path):
    recipe = {
        "threads": 1,
        "model": {"preset": "tiny", "overrides": {"hidden_size": 32, "n_layers": 1}},
        "tokenizer": {"kind": "characters", "alphabet": "0123456789+="},
        "environment": {
            "kind": "mixture",
            "parts": [
                {"kind": "sorting", "digits": 2, "weight": 2},
                {"kind": "arithmetic", "digits": 1},
            ],
        },
        "sampling": {"max_new_tokens": 3},
        "batch_size": 6,
        "steps": 2,
        "evaluation": {"tasks": 12},
        "logging": {"progress": "off", "tensorboard": False},
        "stages": [
            {"name": "sft", "algorithm": {"kind": "sft"}, "steps": 10, "optimizer": {"lr": 1e-3}},
            {"name": "grpo", "algorithm": {"kind": "grpo", "group_size": 4}},
        ],
    }
    (tmp_path / "two.yaml").write_text(yaml.safe_dump(recipe))
    assert start_run(tmp_path / "two.yaml", [], tmp_path / "run", command="test") == 0
    rows = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    drawn = [row for row in rows if row.get("rollout/groups") or "rollout/reward" in row]
    assert len(drawn) == 2
    for row in drawn:
        for name in ("sorting", "arithmetic"):
            assert f"rollout/reward/by_tag/{name}/exact_match" in row
            assert row[f"rollout/environment/prompts/{name}"] > 0
    config = load_config(tmp_path / "run" / "config.yaml")
    assert [part.weight for part in config.stages[0].environment.parts] == [2.0, 1.0]


@pytest.mark.parametrize("learns", ["rows", "pairs"])
def test_files_keep_their_shares_from_any_position_on(learns, tmp_path):
    parts = []
    for name, weight, n_rows in (("a", 0.7, 5), ("b", 0.3, 40)):
        answers = {"answer": name} if learns == "rows" else {"chosen": name, "rejected": "no"}
        lines = [json.dumps({"prompt": f"{name}{i}?", **answers}) for i in range(n_rows)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
        part = {"kind": "dataset", "train": str(tmp_path / f"{name}.jsonl"), "test_share": 0}
        parts.append({**part, "tag": name, "weight": weight})
    mixture = made(parts)
    tasks = list(itertools.islice(mixture.tasks("train", seed=3), 100))
    assert Counter(task.tag for task in tasks) == {"a": 70, "b": 30}
    assert Counter(task.id for task in tasks if task.tag == "a").most_common()[-1][1] == 14
    resumed = made(parts).tasks("train", seed=3, start=37)
    assert list(itertools.islice(resumed, 63)) == tasks[37:]
    for task in tasks:
        learnt = (
            mixture.demonstration(task) if learns == "rows" else mixture.comparison(task).chosen
        )
        assert learnt == (Message("assistant", task.tag),)
