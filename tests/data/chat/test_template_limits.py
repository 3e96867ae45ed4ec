"""Templates that loop, recurse or fill memory are refused by counted steps; what published ones do
is rendered as before."""

from datetime import datetime

import pytest

from ratchet.data.chat.chat_templates import ChatTemplate
from ratchet.errors import DataError
from ratchet.types import Message, ToolCall

DOUBLED = (
    "{% set n = namespace(s=START) %}{% for i in range(60) %}{% set n.s = STEP %}{% endfor "
    "%}{{ n.s END }}"
)


HELLO = (Message("user", "hi"),)


def render(source, messages=HELLO):
    return ChatTemplate(source, {"bos_token": "<s>"}, datetime(2026, 1, 1)).render(
        list(messages), None, prompt=False
    )


def doubled(start, step, end=""):
    return DOUBLED.replace("START", start).replace("STEP", step).replace("END", end)


def loops(*conditions):
    return "".join(f"{{% for a in range(99999){c} %}}" for c in conditions) + "{% endfor %}" * len(
        conditions
    )


STEPS = {
    "nested loops": loops("", "", ""),
    "loops that leave everything out": loops("", " if false"),
    "a recursive loop": "{% for x in [1, 2] recursive %}{% if loop.depth < 40 %}{{ loop([1, 2]) "
    "}}{% endif %}{% endfor %}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ "
    "f(60) }}",
    "sums of texts": doubled("'x'", "n.s + n.s"),
    "joined texts": doubled("'x'", "n.s ~ n.s", "| length"),
    "lists within lists": doubled("[1]", "[n.s, n.s]"),
    "lists as JSON": doubled("[1]", "[n.s, n.s]", "| tojson"),
    "keys of tuples": doubled("(1,)", "(n.s, n.s)", "}}{{ {n.s: 1}"),
    "a literal in a loop": "{% for a in range(99999) %}" + "x" * 100_000 + "{% endfor %}",
    "a search in a loop": "{% set l = range(99999) | list %}"
    + loops("").replace("{% endfor", "{% if -1 in l %}{% endif %}{% endfor"),
    "slices in a loop": "{% set l = 'a' * 9999999 %}"
    + loops("").replace("{% endfor", "{% set x = l[1:] %}{% endfor"),
    "a slow filter": "{% set l = 'a b' * 2000000 %}{{ l | title }}",
    "grouping": loops(" if range(9999) | groupby('real')"),
}
SIZES = {
    "a repetition": "{{ 'a' * 10**10 }}",
    "a list": "{{ [1] * 9999999999 }}",
    "a power": "{{ 9 ** (9 ** 9) }}",
    "squares": doubled("7", "n.s * n.s"),
    "a width": "{{ 'a' | center(9999999999) }}",
    "a width of a method": "{{ 'a'.zfill(9999999999) }}",
    "a format": "{{ '%9999999999d' % 1 }}",
    "a format by a value": "{{ '%*d' % (9999999999, 1) }}",
    "a format of braces": "{{ '{:{}}'.format(1, 9999999999) }}",
    "a filter's format": "{{ '%9999999999d' | format(1) }}",
    "a join": "{{ range(99999) | map('string') | join('x' * 99999) }}",
    "a method's join": "{{ ('x' * 99999).join(['a'] * 99999) }}",
    "a replacement": "{{ ('a' * 99999).replace('a', 'b' * 99999) }}",
    "an indentation": "{{ ('a\n' * 9999) | indent('b' * 99999) }}",
    "bytes of a number": "{{ (5).to_bytes(99999999999, 'big') }}",
    "digits": "{{ 5 | round(-9999999999) }}",
    "JSON's indentation": "{{ [1] | tojson(indent=99999999) }}",
    "a translation": "{{ 'a'.translate({97: 'x' * 99999}) }}",
}
ERRORS = {
    "endless recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "parentheses": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "blocks": "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
    "loops within loops": "{% for a in [1] %}" * 60 + "{% endfor %}" * 60,
    "an overflow": "{{ 'inf' | float | int }}",
    "a division": "{{ 1 / 0 }}",
    "an assertion of Jinja's": "{{ 'a' | truncate(2) }}",
    "another template": "{% include 'x' %}",
    "a long source": "x" * 200_000,
}


@pytest.mark.medium
@pytest.mark.fault("M13")
@pytest.mark.parametrize("source", STEPS.values(), ids=STEPS)
def test_a_template_without_end_is_refused_by_steps(source):
    with pytest.raises(DataError, match="takes more than 501,002 steps"):
        render(source)


@pytest.mark.medium
@pytest.mark.fault("M13")
@pytest.mark.parametrize("source", SIZES.values(), ids=SIZES)
def test_what_multiplies_lengths_is_refused_before(source):
    with pytest.raises(
        DataError,
        match=r"makes more than|digits than a template|wider fields|tojson indents|not for "
        r"templates",
    ):
        render(source)


@pytest.mark.fault("M13")
@pytest.mark.parametrize("source", ERRORS.values(), ids=ERRORS)
def test_every_error_of_a_template_is_a_data_error(source):
    with pytest.raises(DataError) as error:
        render(source)
    assert 20 < len(str(error.value)) < 1000


def test_ordinary_expressions_are_as_jinja_has_them():
    source = (
        "{% set n = namespace(k=0) %}{% for m in messages if m.role != 'x' %}"
        "{% set n.k = n.k + 1 %}"
        "{{ loop.index ~ ':' + m['role'] + ' ' }}{{ m.content[1:] | trim | upper }}"
        "{% if not loop.last %},{% endif %}{% endfor %}"
        "{{ n.k * 2 ** 3 % 5 }} {{ 'i' in messages[0].content }} {{ [1, 2] == [1, 2] }} {{ {'a': "
        "[1]} | tojson }}"
        "{{ '-' * 3 }}{{ '%02d' % 7 }}{{ '{:>4}'.format('x') }}{{ ['a', 'b'] | join('+') }}"
        "{{ messages | map(attribute='role') | list }}"
        "{% macro f(x) %}<{{ x }}>{% endmacro %}{{ f('y') }}{{ n }}{% for x in [3, 1] | sort %}{% "
        "break %}{% endfor %}"
    )
    messages = [Message("user", "hi"), Message("assistant", " so")]
    expected = (
        "1:user I,2:assistant SO1 True True {\"a\": [1]}---07   xa+b['user', "
        "'assistant']<y><Namespace>"
    )
    assert render(source, messages) == expected


def test_the_budget_grows_with_messages():
    quadratic = (
        "{% for a in messages %}{% for b in messages %}{% endfor %}{{ a.content }}{% endfor %}"
    )
    messages = [Message("user", "abc"), Message("assistant", "d", (ToolCall("c", "f", {}),))] * 400
    plain = [Message(message.role, message.text) for message in messages]
    assert render(quadratic, plain) == "abcd" * 400
