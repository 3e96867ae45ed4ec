"""A shop: find a product by search and clicks, choose its options, and buy it.

The pages, actions and reward are in the style of WebShop (arXiv:2207.01206). The catalogue is
generated, so it is none of WebShop's data, and needs no download.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import asdict
from functools import lru_cache, partial
from typing import ClassVar, Literal, NamedTuple

from pydantic import Field

from ratchet.config.sections import EnvironmentConfig
from ratchet.environments.shop.catalogue import (
    Goal,
    Product,
    draw_goal,
    make_catalogue,
    score_purchase,
    search_products,
)
from ratchet.environments.single_turn import Problem, Procedural
from ratchet.errors import DataError
from ratchet.protocols import Step
from ratchet.types import Message, Task

ACTION = re.compile(r"(search|click)\[([^\[\]]{1,200})\]", re.IGNORECASE)
BUY = "buy now"
DESCRIPTION = "description"
NEXT = "next >"
PREVIOUS = "< prev"
BACK = "back to search"
N_CACHED_SEARCHES = 64
RULES = (
    "You are in a shop. Answer with one action: search[WORDS] on the search page, or click[BUTTON] "
    "for a button that the page shows in brackets. Choose the options of a product before you "
    "click[buy now]."
)


class ShopConfig(EnvironmentConfig):
    """A shop in the style of WebShop (arXiv:2207.01206), with a generated catalogue.

    The reward of a purchase is the share of wanted attributes, options and price that it meets.
    """

    builds: ClassVar[str] = "ratchet.environments.shop.environment:Shop"
    data_kinds: ClassVar[frozenset[str]] = frozenset({"rows", "rollouts"})

    products: int = Field(200, ge=10, le=10_000)
    """Number of products in the shop."""
    catalogue_seed: int = 0
    """Seed of the catalogue, which is the same for all tasks and seeds of a run."""
    page_size: int = Field(5, ge=1, le=50)
    """Number of products on a page of results."""
    max_actions: int = Field(15, ge=4, le=1000)
    """Number of messages after which an attempt ends unpaid."""


class ShopState(NamedTuple):
    """The page that the buyer sees."""

    page: Literal["search", "results", "product", "description"] = "search"
    query: str = ""
    """The words of the last search."""
    offset: int = 0
    """Number of results before the page."""
    product: str = ""
    """The id of the product whose page was opened last."""
    chosen: tuple[tuple[str, str], ...] = ()
    """The chosen options of that product, as pairs of name and value."""


class Shop(Procedural):
    """A shop in which a task is to buy what an instruction asks for."""

    name = "shop"

    def __init__(self, config: ShopConfig) -> None:
        self.config = config
        self.catalogue = make_catalogue(config.products, config.catalogue_seed)
        # A page needs its results several times, and a search goes through all products.
        self._search = lru_cache(N_CACHED_SEARCHES)(partial(search_products, self.catalogue))
        self._product_by_id = {product.id: product for product in self.catalogue}

    def sample(self, rng: random.Random) -> Problem:
        product = rng.choice(self.catalogue)
        goal = draw_goal(product, rng)
        prompt = f"{RULES}\n\n{goal.describe()}\n\n{self._show(ShopState())}"
        meta = {"goal": asdict(goal), "product": product.id}
        return Problem(prompt, product.id, meta, key=goal.describe())

    # --- pages

    def _list_buttons(self, state: ShopState) -> list[str]:
        """Return the buttons of a page, without those of products and options."""
        if state.page == "search":
            return []
        if state.page == "results":
            n_results = len(self._search(state.query))
            is_last = state.offset + self.config.page_size >= n_results
            previous = [PREVIOUS] if state.offset else []
            following = [] if is_last else [NEXT]
            return [*previous, *following, BACK]
        if state.page == "description":
            return [PREVIOUS, BACK]
        return [DESCRIPTION, BUY, PREVIOUS, BACK]

    def _list_choices(self, state: ShopState) -> list[str]:
        """Return the products of a page of results, or the options of a product, as clicked."""
        if state.page == "results":
            return [product.id.lower() for product in self._list_results(state)]
        if state.page == "product":
            options = self._get_product(state).options
            return [value for values in options.values() for value in values]
        return []

    def _show(self, state: ShopState) -> str:
        """Return the text of a page."""
        if state.page == "search":
            return "Search page: search[WORDS]"
        lines: list[str] = []
        if state.page == "results":
            lines.append(f"{len(self._search(state.query))} results")
            for product in self._list_results(state):
                lines.append(f"[{product.id.lower()}] {product.title}, ${product.price}")
        else:
            product = self._get_product(state)
            if state.page == "description":
                lines.append(f"{product.title} is {', '.join(product.attributes)}.")
            else:
                lines.append(f"{product.title}, ${product.price}")
                for name, values in product.options.items():
                    lines.append(f"{name}: {_write_buttons(values)}")
                chosen = ", ".join(value for _, value in state.chosen)
                lines.append(f"chosen: {chosen or 'nothing'}")
        return "\n".join([*lines, _write_buttons(self._list_buttons(state))])

    def _list_results(self, state: ShopState) -> Sequence[Product]:
        """Return the products of a page of results."""
        results = self._search(state.query)
        return results[state.offset : state.offset + self.config.page_size]

    def _get_product(self, state: ShopState) -> Product:
        return self._product_by_id[state.product]

    # --- actions

    def _act(self, state: ShopState, text: str) -> ShopState | None:
        """Return the page after the last action in a message; None if the page has no such action.

        Buying ends the episode, so `_play_turn` handles it.
        """
        action, argument = _read_action(text)
        if action == "search":
            return ShopState("results", argument) if state.page == "search" else None
        if action != "click":
            return None
        if argument in self._list_choices(state):
            return self._choose(state, argument)
        return self._press(state, argument) if argument in self._list_buttons(state) else None

    def _choose(self, state: ShopState, choice: str) -> ShopState:
        """Return the page after a click on a product or an option."""
        if state.page == "results":
            return state._replace(page="product", product=choice.upper(), chosen=())
        options = self._get_product(state).options
        name = next(name for name, values in options.items() if choice in values)
        chosen = {**dict(state.chosen), name: choice}
        return state._replace(chosen=tuple(sorted(chosen.items())))

    def _press(self, state: ShopState, button: str) -> ShopState:
        """Return the page after a click on a button of a page, other than BUY."""
        size = self.config.page_size
        if button == BACK:
            return ShopState()
        if button == NEXT:
            return state._replace(offset=state.offset + size)
        if button == DESCRIPTION:
            return state._replace(page="description")
        if state.page == "results":
            return state._replace(offset=state.offset - size)
        return state._replace(page="product" if state.page == "description" else "results")

    def _play_turn(
        self, task: Task, state: ShopState, turn: int, text: str
    ) -> tuple[ShopState, Step]:
        """Return the page and the step after a message. Turns count from 0."""
        key = "/".join(map(str, state))
        if state.page == "product" and _read_action(text) == ("click", BUY):
            goal = Goal.from_meta(task.meta)
            reward = score_purchase(goal, self._get_product(state), dict(state.chosen))
            metrics = {"bought_right": float(reward == 1.0), "invalid_actions": 0.0}
            return state, Step(reward=reward, done=True, state_key=key, metrics=metrics)
        new_state = self._act(state, text)
        is_invalid = new_state is None
        next_state = state if new_state is None else new_state
        is_done = turn + 1 >= self.config.max_actions
        shown = ("There is no such action here.\n" if is_invalid else "") + self._show(next_state)
        return next_state, Step(
            messages=() if is_done else (Message("user", shown),),
            reward=0.0,
            done=is_done,
            state_key=key,
            metrics={"bought_right": 0.0, "invalid_actions": float(is_invalid)},
        )

    # --- the protocol

    async def reset(self, task: Task) -> Sequence[Message]:
        self._current_task = task
        self._state = ShopState()
        self._turns = 0
        return task.messages

    async def step(self, message: Message) -> Step:
        self._state, step = self._play_turn(
            self._current_task, self._state, self._turns, message.text
        )
        self._turns += 1
        return step

    def demonstration(self, task: Task) -> Sequence[Message]:
        """Return a search for the wanted product, its options, and the purchase.

        Raises DataError if it takes more than `max_actions` messages.
        """
        goal = Goal.from_meta(task.meta)
        product = self._product_by_id[task.meta["product"]]
        query = " ".join((product.brand, product.kind, *product.attributes)).lower()
        results = self._search(query)
        n_pages = results.index(product) // self.config.page_size
        actions = [
            f"search[{query}]",
            *[f"click[{NEXT}]"] * n_pages,
            f"click[{product.id.lower()}]",
        ]
        actions += [f"click[{value}]" for value in goal.options.values()]
        actions.append(f"click[{BUY}]")
        if len(actions) > self.config.max_actions:
            raise DataError(
                f"{task.label} takes {len(actions)} messages, and max_actions="
                f"{self.config.max_actions}: raise max_actions or page_size"
            )
        state, messages = ShopState(), list[Message]()
        for turn, action in enumerate(actions):
            state, step = self._play_turn(task, state, turn, action)
            messages += [Message("assistant", action), *step.messages]
        return messages


def _read_action(text: str) -> tuple[str, str]:
    """Return the last action in a message and its argument, in lower case; "" for none."""
    actions: Sequence[tuple[str, str]] = ACTION.findall(text)
    action, argument = actions[-1] if actions else ("", "")
    return action.lower(), argument.strip().lower()


def _write_buttons(buttons: Sequence[str]) -> str:
    return " ".join(f"[{button}]" for button in buttons)
