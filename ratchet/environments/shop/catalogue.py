"""Generate the shop's products, search them, and judge a purchase."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple


class Department(NamedTuple):
    """A department of the shop."""

    kinds: tuple[str, ...]
    """The kinds of its products."""
    attributes: tuple[str, ...]
    """Properties that a product has or lacks."""
    options: Mapping[str, tuple[str, ...]]
    """The values that a buyer chooses from, by the name of the option."""


COLOURS = ("black", "white", "red", "blue", "green", "grey")
DEPARTMENTS: Mapping[str, Department] = {
    "clothing": Department(
        ("jacket", "shirt", "dress", "scarf"),
        ("waterproof", "cotton", "lightweight", "machine washable", "slim fit", "hand made"),
        {"colour": COLOURS, "size": ("small", "medium", "large", "x-large")},
    ),
    "home": Department(
        ("lamp", "pillow", "curtain", "rug"),
        ("energy saving", "easy to clean", "non slip", "hand made", "space saving", "washable"),
        {"colour": COLOURS, "pack": ("1 piece", "2 pieces", "4 pieces")},
    ),
    "electronics": Department(
        ("headphones", "speaker", "charger", "keyboard"),
        ("wireless", "noise cancelling", "fast charging", "waterproof", "portable", "lightweight"),
        {"colour": COLOURS},
    ),
    "beauty": Department(
        ("shampoo", "lotion", "soap", "toothpaste"),
        ("fragrance free", "cruelty free", "natural", "vegan", "sulfate free", "travel size"),
        {"scent": ("mint", "lavender", "rose", "lemon"), "volume": ("100 ml", "250 ml", "500 ml")},
    ),
}
BRANDS = ("Alder", "Birch", "Cedar", "Delta", "Ember", "Fjord", "Grove", "Haven")
N_ATTRIBUTES = 3  # of each product
PRICE_STEP = 10  # a buyer's limit is a multiple of this many dollars


@dataclass(frozen=True)
class Product:
    """A product. Its title names the first attribute only; its description names all.

    `options` are the values on offer, by the name of the option. `price` is in dollars.
    """

    id: str
    department: str
    kind: str
    brand: str
    attributes: tuple[str, ...]
    options: Mapping[str, tuple[str, ...]]
    price: int

    @property
    def title(self) -> str:
        return f"{self.brand} {self.attributes[0]} {self.kind}"

    @cached_property
    def words(self) -> frozenset[str]:
        """Return the words that a search finds the product by."""
        text = " ".join((self.brand, self.kind, self.department, *self.attributes))
        return frozenset(split_words(text))


@dataclass(frozen=True)
class Goal:
    """A purchase that a buyer wants.

    `options` are the wanted values by the name of the option, and `max_price` is in dollars.
    """

    department: str
    kind: str
    attributes: tuple[str, ...]
    options: Mapping[str, str]
    max_price: int

    @classmethod
    def from_meta(cls, meta: Mapping[str, Any]) -> Goal:
        """Return the goal that a task's `meta` holds."""
        fields = {**meta["goal"], "attributes": tuple(meta["goal"]["attributes"])}
        return cls(**fields)

    def describe(self) -> str:
        """Return the goal as an instruction."""
        options = ", ".join(f"{name}: {value}" for name, value in self.options.items())
        return (
            f"Find a {self.kind} that is {' and '.join(self.attributes)}, with {options}, and "
            f"price lower than {self.max_price} dollars."
        )


def make_catalogue(n_products: int, seed: int) -> tuple[Product, ...]:
    """Return the products of a shop, which the arguments determine."""
    rng = random.Random(f"shop/{seed}")
    products: list[Product] = []
    for number in range(n_products):
        name = rng.choice(sorted(DEPARTMENTS))
        department = DEPARTMENTS[name]
        options = {
            option: tuple(sorted(rng.sample(values, rng.randint(2, len(values)))))
            for option, values in department.options.items()
        }
        attributes = tuple(rng.sample(department.attributes, N_ATTRIBUTES))
        kind = rng.choice(department.kinds)
        brand = rng.choice(BRANDS)
        price = rng.randint(5, 99)
        products.append(Product(f"P{number:04}", name, kind, brand, attributes, options, price))
    return tuple(products)


def draw_goal(product: Product, rng: random.Random) -> Goal:
    """Return a goal that the product meets in full: two of its attributes, and its options."""
    return Goal(
        product.department,
        product.kind,
        tuple(rng.sample(product.attributes, N_ATTRIBUTES - 1)),
        {name: rng.choice(values) for name, values in product.options.items()},
        (product.price // PRICE_STEP + 1) * PRICE_STEP,
    )


def search_products(products: Sequence[Product], query: str) -> tuple[Product, ...]:
    """Return the products that share a word with a query, those with the most words first."""
    words = frozenset(split_words(query))
    matching = [product for product in products if words & product.words]
    matching.sort(key=lambda product: (-len(words & product.words), product.id))
    return tuple(matching)


def split_words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", text.lower())


def score_purchase(goal: Goal, product: Product, chosen: Mapping[str, str]) -> float:
    """Return the reward of a purchase, from 0 to 1.

    r = r_type (|U_att & Y_att| + |U_opt & Y_opt| + [y_price <= u_price]) / (|U_att| + |U_opt| + 1)
    for the goal U and the purchase Y. WebShop (arXiv:2207.01206), section 3.2. The paper matches
    titles for r_type; here it is 1 for the goal's kind, 0.5 for another kind of its department, and
    else 0.
    """
    if product.department != goal.department:
        return 0.0
    r_type = 1.0 if product.kind == goal.kind else 0.5
    n_attributes = len(set(goal.attributes) & set(product.attributes))
    n_options = sum(chosen.get(name) == value for name, value in goal.options.items())
    matches = n_attributes + n_options + (product.price <= goal.max_price)
    return r_type * matches / (len(goal.attributes) + len(goal.options) + 1)
