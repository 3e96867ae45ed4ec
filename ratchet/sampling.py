"""Define the sampling settings of a completion, and the bounds of their values.

Recipes, requests and Python code all create a `Sampling`, which checks itself. Bounds are stated
only here, except where code has its own reason for a narrower one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from math import isfinite
from numbers import Integral, Real
from typing import Any

from ratchet.errors import SamplingError
from ratchet.structured_output import StructuredOutput

# Logits are float32, whose neighbours near 32 lie 4e-6 apart. Below 1e-5, dividing by the
# temperature turns that rounding into half a nat, so no recorded logprob means anything. (Where
# logits reach 1e4 the quotient overflows below 3e-35.) Above 1e5, logits that differ by 100 give
# probabilities that differ by a thousandth: the model no longer matters.
LEAST_TEMPERATURE, LARGEST_TEMPERATURE = 1e-5, 1e5
LARGEST_COUNT = 2**31 - 1  # the largest integer that every generator can hold
LEAST_SEED, LARGEST_SEED = -(2**63), 2**64 - 1
MAX_STOP_IDS = 4096  # each is compared with each row's token at every step
# At every token, text of at least twice the longest stop string's length is decoded and searched
# for every stop string.
MAX_STOP_STRINGS, MAX_STOP_STRING_LENGTH = 64, 1024
_set_field = object.__setattr__  # sets fields of a frozen dataclass, as its own __init__ does


@dataclass(frozen=True, slots=True)
class Sampling:
    """The sampling settings of one completion.

    Equal (tokens, sampling, weights) give equal completions, independently of other requests.
    The filters top_k, top_p and min_p act in this order. Each reads the probabilities that the
    temperature gives; those of the kept tokens are renormalised once, after all filters.

    Raises SamplingError for a value with which no token can be sampled. NumPy numbers become Python
    numbers, lists become tuples.
    """

    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0  # 1: off
    top_k: int = 0  # 0: off
    min_p: float = 0.0  # 0: off
    max_new_tokens: int = 256
    # Stop strings and stop tokens end a completion and are part of it.
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    seed: int = 0
    # True to record which experts of a mixture of experts compute each token.
    routes: bool = False
    # Number of tokens at the end of the prompt that were drawn for this completion before it was
    # interrupted. The completion continues as if it had not been interrupted.
    drawn: int = 0
    # Name of an adapter that the generator serves; None: the policy's own, "base": no adapter.
    adapter: str | None = None
    # Grammar that the completion must follow, also given as a mapping ({"regex": "[ab]+"}).
    # The filters act on the tokens that the grammar allows.
    structured: StructuredOutput | None = None

    def __post_init__(self) -> None:
        if not self._is_plain():
            for name, check in CHECKS.items():
                _set_field(self, name, check(name, getattr(self, name)))

    def _is_plain(self) -> bool:
        """True if every value has its plain type and lies in its range.

        This runs for every turn of an attempt, so it is a single expression. It takes 0.4 us
        without stop strings and stop ids, and 1.4 us with them.
        """
        temperature = self.temperature
        top_p = self.top_p
        ids = self.stop_ids
        stop = self.stop
        return (
            type(temperature) is type(top_p) is type(self.min_p) is float
            and type(self.top_k)
            is type(self.max_new_tokens)
            is type(self.seed)
            is type(self.drawn)
            is int
            and type(ids) is type(stop) is tuple
            and (temperature == 0.0 or LEAST_TEMPERATURE <= temperature <= LARGEST_TEMPERATURE)
            and 0.0 < top_p <= 1.0
            and 0.0 <= self.min_p < 1.0
            and 0 <= self.top_k <= LARGEST_COUNT
            and 0 <= self.max_new_tokens <= LARGEST_COUNT
            and 0 <= self.drawn <= LARGEST_COUNT
            and LEAST_SEED <= self.seed <= LARGEST_SEED
            and (not ids or _are_valid_stop_ids(ids))
            and (not stop or _are_valid_stop_strings(stop))
            and type(self.routes) is bool
            and (self.adapter is None or type(self.adapter) is str)
            and (self.structured is None or type(self.structured) is StructuredOutput)
        )

    def seeded(self, seed: int) -> Sampling:
        """Return a copy with another seed.

        Only the seed is checked, which takes 40 % of the time of `dataclasses.replace`.
        """
        copy = object.__new__(Sampling)
        for name in FIELDS:
            _set_field(copy, name, getattr(self, name))
        _set_field(copy, "seed", CHECKS["seed"]("seed", seed))
        return copy

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_filters(self) -> bool:
        """True if filters can remove tokens, so that `log_kept_mass` is not all zero."""
        return not self.greedy and (self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0)


FIELDS = tuple(field.name for field in fields(Sampling))


def check_setting(name: str, value: Any) -> Any:
    """Return the value of one field of `Sampling` in its plain type.

    Raises SamplingError if no token can be sampled with it.
    """
    return CHECKS[name](name, value)


def _are_valid_stop_ids(ids: tuple[Any, ...]) -> bool:
    return (
        {*map(type, ids)} == {int}
        and len(ids) <= MAX_STOP_IDS
        and min(ids) >= 0
        and max(ids) <= LARGEST_COUNT
    )


def _are_valid_stop_strings(stops: tuple[Any, ...]) -> bool:
    return (
        {*map(type, stops)} == {str}
        and len(stops) <= MAX_STOP_STRINGS
        and all(stops)
        and max(map(len, stops)) <= MAX_STOP_STRING_LENGTH
        and not any(map(_has_surrogate, stops))
    )


def _has_surrogate(text: str) -> bool:
    return not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text)


# --- checks of each field, whose errors name the smallest fix


def _make_error(name: str, value: object, problem: str, fix: object) -> SamplingError:
    return SamplingError(f"{name}={_shorten(value)} {problem}. Set {name}={fix}.", field=name)


def _shorten(value: object) -> str:
    try:
        text = repr(value)
    except ValueError:  # Python converts no integer of more than 4,300 digits to text
        return "(a number of thousands of digits)"
    return text if len(text) <= 60 else f"{text[:57]}..."


def _check_real(name: str, value: Any, default: object) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise _make_error(name, value, "is not a number", default)
    try:
        number = float(value)
    except OverflowError:
        number = float("inf")
    if not isfinite(number):
        raise _make_error(name, value, "is not a finite number", default)
    return number


def _check_temperature(name: str, value: Any) -> float:
    number = _check_real(name, value, 1)
    if number < 0:
        raise _make_error(name, value, "is below 0", f"0 (greedy) or {LEAST_TEMPERATURE:g} or more")
    if 0 < number < LEAST_TEMPERATURE:
        problem = (
            f"is too small: below {LEAST_TEMPERATURE:g} the division of logits by it leaves "
            "rounding noise, or overflows"
        )
        raise _make_error(name, value, problem, f"0 (greedy) or {LEAST_TEMPERATURE:g}")
    if number > LARGEST_TEMPERATURE:
        raise _make_error(
            name,
            value,
            "is too large: every token would be equally likely",
            f"{LARGEST_TEMPERATURE:g} or less",
        )
    return number


def _check_top_p(name: str, value: Any) -> float:
    number = _check_real(name, value, "1 (off)")
    if not 0 < number <= 1:
        raise _make_error(name, value, "is not above 0 and at most 1", "1 (off)")
    return number


def _check_min_p(name: str, value: Any) -> float:
    number = _check_real(name, value, "0 (off)")
    if not 0 <= number < 1:
        raise _make_error(name, value, "is not at least 0 and below 1", "0 (off)")
    return number


def _make_integer_check(least: int, largest: int, default: str) -> Callable[[str, Any], int]:
    def check(name: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise _make_error(name, value, "is not a whole number", default)
        number = int(value)
        if not least <= number <= largest:
            raise _make_error(name, value, f"is outside of {least:,} to {largest:,}", default)
        return number

    return check


def _check_stop(name: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list | tuple):
        raise _make_error(name, value, "is not a sequence of strings", "[] (none)")
    for text in value:
        if not isinstance(text, str) or not text:
            raise _make_error(
                name,
                text,
                "is not text, or is empty, which would end every completion at once",
                "[] (none)",
            )
        if len(text) > MAX_STOP_STRING_LENGTH:
            raise _make_error(
                name,
                text,
                f"has {len(text):,} characters",
                f"strings of at most {MAX_STOP_STRING_LENGTH:,} characters",
            )
        if _has_surrogate(text):
            raise _make_error(
                name, text, "has half of a surrogate pair, which no text contains", "other strings"
            )
    if len(value) > MAX_STOP_STRINGS:
        raise _make_error(
            name, value, f"has {len(value):,} strings", f"at most {MAX_STOP_STRINGS} of them"
        )
    return tuple(map(str, value))


def _check_stop_ids(name: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list | tuple):
        raise _make_error(name, value, "is not a sequence of token ids", "[] (none)")
    if len(value) > MAX_STOP_IDS:
        raise _make_error(
            name, value, f"has {len(value):,} ids", f"at most {MAX_STOP_IDS:,} of them"
        )
    return tuple(_check_token_id(name, token) for token in value)


def _check_routes(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise _make_error(name, value, "is neither True nor False", False)
    return value


def _check_adapter(name: str, value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise _make_error(name, value, "is not a string", "None (the policy's own adapter)")
    return value


def _check_structured(name: str, value: Any) -> StructuredOutput | None:
    if value is None or isinstance(value, StructuredOutput):
        return value
    try:
        if not isinstance(value, Mapping):
            raise ValueError("is not a mapping")
        return StructuredOutput.from_mapping(value)
    except ValueError as error:
        raise _make_error(name, value, str(error), "None (no grammar)") from None


_check_token_id = _make_integer_check(0, LARGEST_COUNT, "[] (none)")
_check_count = _make_integer_check(0, LARGEST_COUNT, "0 or more")
CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "temperature": _check_temperature,
    "top_p": _check_top_p,
    "top_k": _make_integer_check(0, LARGEST_COUNT, "0 (off)"),
    "min_p": _check_min_p,
    "max_new_tokens": _make_integer_check(0, LARGEST_COUNT, "256"),
    "stop": _check_stop,
    "stop_ids": _check_stop_ids,
    "seed": _make_integer_check(LEAST_SEED, LARGEST_SEED, "0"),
    "routes": _check_routes,
    "drawn": _check_count,
    "adapter": _check_adapter,
    "structured": _check_structured,
}
