"""The shop: pages and actions by hand, the reward's formula, and the kit."""

import asyncio
from dataclasses import replace
from itertools import islice

import pytest

from ratchet.config.resolve import build, resolve
from ratchet.environments.shop.catalogue import Goal, Product, make_catalogue, score_purchase
from ratchet.errors import DataError
from ratchet.testing import check_environment
from ratchet.types import Message

LAMP = Product(
    "P0001", "home", "lamp", "Alder", ("washable", "non slip", "hand made"),
    {"colour": ("blue", "red"), "pack": ("1 piece", "2 pieces")}, 25,
)  # fmt: skip
GOAL = Goal("home", "lamp", ("washable", "non slip"), {"colour": "red", "pack": "1 piece"}, 30)


def made(**keys):
    return build(resolve("environment", {"kind": "shop", **keys}))


def play(environment, task, *texts):
    async def attempt():
        await environment.reset(task)
        return [await environment.step(Message("assistant", text)) for text in texts]

    return asyncio.run(attempt())


def test_the_kit():
    check_environment(made(), n=4)


@pytest.mark.parametrize(
    ("product", "chosen", "reward"),
    [
        (LAMP, {"colour": "red", "pack": "1 piece"}, 1.0),
        (LAMP, {"colour": "blue", "pack": "1 piece"}, 4 / 5),
        (LAMP, {}, 3 / 5),
        (replace(LAMP, price=31), {"colour": "red", "pack": "1 piece"}, 4 / 5),
        (replace(LAMP, attributes=("washable",)), {"colour": "red"}, 3 / 5),
        (replace(LAMP, kind="rug"), {"colour": "red", "pack": "1 piece"}, 1 / 2),
        (replace(LAMP, department="beauty"), {"colour": "red", "pack": "1 piece"}, 0.0),
    ],
)
def test_the_reward_is_the_share_of_what_was_wanted(product, chosen, reward):
    assert score_purchase(GOAL, product, chosen) == pytest.approx(reward)


def test_the_pages_of_a_purchase():
    environment = made()
    task = next(iter(environment.tasks("train", seed=0)))
    answers = [m.text for m in environment.demonstration(task) if m.role == "assistant"]
    search, open_product, *choices, buy = answers
    results, product, *chosen, bought = play(
        environment, task, search.upper(), f"I see it. {open_product}", *choices, buy
    )
    product_id = task.answer.lower()
    assert f"[{product_id}] " in results.messages[0].text
    assert "chosen: nothing" in product.messages[0].text
    assert choices[-1][6:-1] in chosen[-1].messages[0].text.partition("chosen: ")[2]
    assert (bought.reward, bought.done) == (1.0, True)
    assert bought.metrics == {"bought_right": 1.0, "invalid_actions": 0.0}
    steps = play(environment, task, search, open_product, "click[description]", "click[< prev]")
    described, again = steps[2:]
    wanted = task.meta["goal"]["attributes"]
    assert all(attribute in described.messages[0].text for attribute in wanted)
    assert again.messages == product.messages
    early = play(environment, task, search, open_product, buy)[-1]
    assert early.done
    assert 0 < early.reward < 1


def test_pages_of_results_go_on_and_back():
    environment = made(page_size=2)
    task = next(iter(environment.tasks("train", seed=0)))
    first, second, back, home = play(
        environment, task, "search[lamp]", "click[next >]", "click[< prev]", "click[back to search]"
    )
    assert first.messages == back.messages != second.messages
    assert "[< prev]" not in first.messages[0].text
    assert "[< prev] [next >] [back to search]" in second.messages[0].text
    assert home.messages[0].text == task.messages[0].text.rpartition("\n\n")[2]


@pytest.mark.parametrize(
    "text", ["", "buy", "click[buy now]", "click[p0001]", "search[]", "search[a][b]", "click[[x]]"]
)
def test_what_is_no_action_of_the_page_changes_nothing(text):
    environment = made(max_actions=4)
    task = next(iter(environment.tasks("train", seed=0)))
    *steps, last = play(environment, task, *[text] * 4)
    if text != "search[a][b]":
        assert {step.messages[0].text.partition("\n")[0] for step in steps} == {
            "There is no such action here."
        }
        assert {step.metrics["invalid_actions"] for step in steps} == {1.0}
    assert (last.done, last.reward, last.messages) == (True, 0.0, ())


def test_a_demonstration_that_takes_too_long_is_refused():
    environment = made(max_actions=4)
    clothing = (t for t in environment.tasks("train", seed=0) if len(t.meta["goal"]["options"]) > 1)
    with pytest.raises(DataError, match="takes 5 messages, and max_actions=4"):
        environment.demonstration(next(clothing))


def test_keys_change_the_shop():
    assert make_catalogue(50, 0) == make_catalogue(50, 0) != make_catalogue(50, 1)
    first = [made(**keys) for keys in ({}, {"products": 50}, {"catalogue_seed": 1})]
    goals = [next(iter(shop.tasks("train", seed=0))).messages for shop in first]
    assert len(set(goals)) == 3
    tests = [task.messages for task in islice(first[0].tasks("test", seed=0), 200)]
    assert len(set(tests)) == 200, "there are enough held-out instructions"
