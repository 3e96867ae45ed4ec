"""What is read from outside, mutated: each example is accepted, or refused by an error of ours with
a bounded message.

Any other exception fails, and so does an example that never ends. Examples are the same in every
run.
"""

import contextlib
import json
import shutil
from copy import deepcopy
from datetime import datetime
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from ratchet.commands.describe_recipe import describe
from ratchet.config.loader import load_config
from ratchet.config.model_shape.decoder_config import DecoderConfig, unsupported_reason
from ratchet.config.model_shape.presets import PRESETS, get_preset
from ratchet.config.yaml_tree import write_text
from ratchet.data.chat.builtin_tokenizers import byte_tokenizer
from ratchet.data.chat.chat_templates import BUILTIN_TEMPLATES, ChatTemplate
from ratchet.data.chat.messages import read_messages, read_tools
from ratchet.data.chat.renderer import Renderer
from ratchet.data.chat.tool_calls import FORMATS
from ratchet.errors import RatchetError
from ratchet.experience.openai_proxy.schema import ChatRequest
from ratchet.experience.openai_proxy.wire import ApiError
from ratchet.models.flops import DecoderCost
from ratchet.types import Message
from ratchet.utils.safe_read import is_deeper

pytestmark = pytest.mark.slow

TESTS = Path(__file__).resolve().parent
RECIPES = sorted((TESTS.parent / "ratchet" / "recipes").glob("*.yaml"))
TEMPLATES = [
    path.read_text(encoding="utf-8")
    for path in sorted((TESTS / "data" / "templates").glob("*.jinja"))
]
LONGEST = 12_000  # characters of a message


@contextlib.contextmanager
def only_refused(*more):
    """Let errors of ours pass whose messages say something, within bounds."""
    try:
        yield
    except (RatchetError, *more) as error:
        length = len(str(error))
    else:
        return
    assert 0 < length < LONGEST


def examples(count):
    return settings(max_examples=count, deadline=None)


# --- values

NUMBERS = [
    0,
    -1,
    1,
    2**31,
    2**63,
    2**64,
    10**12,
    10**90,
    -(10**12),
    0.0,
    -0.5,
    1e-40,
    1e300,
    True,
    False,
    None,
]
TEXTS = [
    "",
    " ",
    "x",
    "1e5",
    ".inf",
    "null",
    "os:system",
    "../../x:Y",
    "a.b.c",
    "s3://a/b",
    "/dev/zero",
    "x" * 3000,
    "{",
]
TEXTS += ["{{ 9**9**9 }}", "\0", "\u202e", "\u00e9\ud800"]
CONTAINERS = [
    [],
    {},
    [[]],
    [1, 2],
    ["x"],
    {"kind": "x"},
    {"kind": 5},
    {"x": {"y": 1}},
    [{"kind": "sft"}],
    [None],
]
ODD = [*NUMBERS, *TEXTS, *CONTAINERS]
odd = st.sampled_from(ODD)
nested = st.recursive(
    odd,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)


def places(value, path=()):
    """Every path in a value of dicts and lists."""
    yield path
    children = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, child in children:
        yield from places(child, (*path, key))


def changed(draw, value, times=3):
    """A copy with some of its values replaced, removed, copied elsewhere or put under another
    key."""
    value = deepcopy(value)
    for _ in range(draw(st.integers(1, times))):
        paths = [path for path in places(value) if path]
        if not paths:
            return deepcopy(draw(nested))
        *above, last = draw(st.sampled_from(paths))
        parent = value
        for key in above:
            parent = parent[key]
        match draw(st.integers(0, 4)):
            case 0:
                del parent[last]
            case 1 if isinstance(parent, dict):
                parent[draw(st.sampled_from([*parent, "kind", "name", "stages", "x"]))] = deepcopy(
                    parent[last]
                )
            case 2 if isinstance(parent, list):
                parent += deepcopy(parent[:50])
            case _:
                parent[last] = deepcopy(draw(nested))
    return value


def spoilt(draw, text, tokens):
    """A copy of a text with pieces removed, doubled, moved, and others put in."""
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(text)))
        end = min(len(text), start + draw(st.sampled_from([0, 1, 2, 5, 20, 100])))
        piece = draw(st.sampled_from([*tokens, "", text[start:end] * 2, text[: end - start]]))
        text = text[:start] + piece + text[end:]
    return text


# --- recipes

YAML = [
    "&a ",
    "*a",
    "<<: *a\n",
    "<<: [*a, *a]\n",
    "[",
    "]",
    "{",
    "}",
    ": ",
    "- ",
    "\n",
    "\t",
    "!!int ",
    "!x ",
    "? ",
    "| \n",
]
YAML += [
    "> \n",
    "'",
    '"',
    "%",
    "---\n",
    "...\n",
    "\0",
    "\ufeff",
    "\u2028",
    "9" * 400,
    "1e999",
    "[" * 200,
    "- " * 200,
]
YAML += ["extends: x.yaml\n", "stages:\n", "kind: "]


@pytest.fixture(scope="module")
def recipes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recipes")
    for path in RECIPES:
        shutil.copy(path, folder)
    return folder


def check(folder, text):
    path = folder / "mutated.yaml"
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    with only_refused():
        describe(load_config(path))


@pytest.mark.fault("C13")
@examples(250)
@given(st.data())
def test_recipes_with_spoilt_text(recipes, data):
    check(
        recipes,
        spoilt(data.draw, data.draw(st.sampled_from(RECIPES)).read_text(encoding="utf-8"), YAML),
    )


@pytest.mark.fault("C13")
@examples(250)
@given(st.data())
def test_recipes_with_changed_values(recipes, data):
    recipe = changed(
        data.draw, yaml.safe_load(data.draw(st.sampled_from(RECIPES)).read_text(encoding="utf-8"))
    )
    check(recipes, write_text(recipe if isinstance(recipe, dict) else {"x": recipe}))


@examples(150)
@given(st.data())
def test_overrides(recipes, data):
    key = data.draw(
        st.sampled_from(
            [
                "model.overrides",
                "stages.0.steps",
                "sampling",
                "algorithm.kind",
                "seed",
                "",
                "a..b",
                "stages",
                "x",
            ]
        )
    )
    value = data.draw(st.sampled_from(YAML) | st.text(max_size=20) | nested.map(repr))
    with only_refused():
        describe(load_config(recipes / "quickstart.yaml", [f"{key}={value}"]))


# --- models

HF = get_preset("tiny", vocab_size=300).to_hf() | {
    "rope_scaling": {"rope_type": "yarn", "factor": 2.0},
    "layer_types": ["full_attention"],
}
MOE = get_preset("tiny-moe", vocab_size=300).to_hf() | {"moe_intermediate_size": 8}


@pytest.mark.fault("M13")
@examples(400)
@given(st.data())
def test_configurations_of_models(data):
    hf = changed(
        data.draw,
        data.draw(
            st.sampled_from(
                [HF, MOE, {**HF, "model_type": "llama"}, {**HF, "model_type": "mixtral"}]
            )
        ),
    )
    if not isinstance(hf, dict):
        return
    with only_refused():
        if unsupported_reason(hf) is None:
            shape = DecoderConfig.from_hf(hf, {"eos_token_id": data.draw(nested)})
            assert DecoderCost(shape).parameters > 0


@examples(200)
@given(st.data())
def test_shapes_of_presets(data):
    fields = [*get_preset("tiny-moe", 300).__dataclass_fields__, "x"]
    overrides = data.draw(st.dictionaries(st.sampled_from(fields), nested, max_size=3))
    with only_refused():
        shape = get_preset(
            data.draw(st.sampled_from(list(PRESETS))), **{"vocab_size": 300, **overrides}
        )
        assert DecoderCost(shape).parameters > 0
        shape.to_hf()


# --- conversations, requests, calls

CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CONVERSATION = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": [{"type": "text", "text": "u"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c", "content": "r"},
]
PARAMETERS = {"type": "object", "properties": {"x": {}}}
TOOLS = [
    {"type": "function", "function": {"name": "f", "description": "d", "parameters": PARAMETERS}}
]
REQUEST = {
    "model": "policy",
    "messages": CONVERSATION,
    "tools": TOOLS,
    "temperature": 1.0,
    "stop": ["x"],
    "seed": 1,
}


@pytest.fixture(scope="module")
def renderer():
    return Renderer(byte_tokenizer(), "chatml")


@examples(300)
@given(st.data())
def test_requests(renderer, data):
    body = json.dumps(changed(data.draw, REQUEST))
    if data.draw(st.booleans()):
        body = spoilt(
            data.draw,
            body,
            ["[" * 500, '{"a":' * 300, "9" * 5000, "1e999", "NaN", "\\ud800", "\0", "null", '"'],
        )
    with only_refused(ApiError):
        request = ChatRequest.read(body.encode("utf-8", "surrogatepass"))
        renderer.prompt(request.conversation, request.offered_tools)


@examples(250)
@given(st.data())
def test_conversations_in_data(renderer, data):
    rows = changed(data.draw, {"messages": CONVERSATION, "tools": TOOLS})
    if not isinstance(rows, dict):
        return
    with only_refused():
        tools = read_tools(rows.get("tools"), "row 1")
        renderer.prompt(read_messages(rows.get("messages"), "row 1"), tools or None)


CALL_MARKS = r"""
<tool_call> </tool_call> {"name":"f","arguments":{"x":1}} <function=f> <parameter=x> </parameter> </function> [TOOL_CALLS]
[ARGS] [CALL_ID] [{"name":"f","arguments":"{}"}] <|python_tag|> f.call(x=1) [f(x='a',y=[1,{'z':None}])] <think> </think>
<｜tool▁calls▁begin｜> <｜tool▁call▁begin｜> function<｜tool▁sep｜>f <｜tool▁call▁end｜> </｜DSML｜invoke> </｜DSML｜parameter>
\ " ' 1e999 \ud800 \x NaN ; , = { } [ ] ( )
"""
CALLS = CALL_MARKS.split()
CALLS += [
    "```json\n{}\n```",
    '<｜DSML｜invoke name="f">',
    '<｜DSML｜parameter name="x" string="true">',
    "\ud800",
    " ",
    "\n",
]
CALLS += ["[" * 300, "(" * 300, '{"a":' * 300, "9" * 5000]


@examples(500)
@given(
    st.sampled_from(list(FORMATS)),
    st.lists(st.sampled_from(CALLS) | st.text(max_size=5), max_size=12),
)
def test_tool_calls_of_all_families(name, pieces):
    text = "".join(pieces)
    found = FORMATS[name].parse(text, TOOLS)
    assert found.malformed == 0 or found.content == text
    for called, arguments in found.calls:
        assert called
        assert isinstance(arguments, dict)
        assert not is_deeper(arguments, 40)
    FORMATS[name].number_calls(found.calls, 0)


# --- templates

JINJA = """
{% for a in range(99999) %}
{% endfor %}
{% for m in messages recursive %}
{{ loop(messages) }}
{% if true %}
{% endif %}
{% macro f(n) %}
{% endmacro %}
{{ f(9) }}{{ f(f(9)) }}
{% set x = messages %}
{% set x = [x, x] %}
{% set x = x + x %}
{% set n = namespace(s='a') %}
{% set n.s = n.s + n.s %}
{% set n.s = n.s ~ n.s %}
{% set n.s = [n.s, n.s] %}
{{ n.s }}{{ x }}
{{ x | tojson }}
{{ 'a' * 10**9 }}
{{ 9 ** 9 ** 9 }}
{{ 'a' | center(10**9) }}
{{ x | join('a' * 999) }}
{{ x == n.s }}{{ -1 in x }}
{{ '%9999999d' % 1 }}
{{ x.__class__ }}
{{ raise_exception('no') }}
{{ strftime_now('%Y') }}
{{ messages[99].a }}
{{ 1 / 0 }}
{{ x | sort | list }}
{{ x | groupby('a') }}
{{ x | map('upper') | list }}
{% include 'x' %}
{% break %}
{{
}}
{%
%}
{% generation %}
{% endgeneration %}
{% filter upper %}
{% endfilter %}
{% call f(1) %}
{% endcall %}
{{ message.content[::-1] }}
""".strip().split("\n")
JINJA += ["(" * 300]


@pytest.mark.fault("M13")
@examples(300)
@given(st.data())
def test_chat_templates(data):
    if data.draw(st.booleans()):
        source = "".join(data.draw(st.lists(st.sampled_from(JINJA), max_size=14)))
    else:
        source = spoilt(
            data.draw, data.draw(st.sampled_from([*TEMPLATES, *BUILTIN_TEMPLATES.values()])), JINJA
        )
    messages = [Message("user", "a"), Message("assistant", "b"), Message("user", "c")]
    with only_refused():
        template = ChatTemplate(
            source, {"bos_token": "<s>", "eos_token": "</s>"}, datetime(2026, 1, 1)
        )
        assert len(template.render(messages, TOOLS, prompt=True)) < 1 << 26
