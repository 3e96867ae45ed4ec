"""Tool calls as each family writes them, and as it should not."""

import json

import pytest
from data.test_templates_families import FAMILIES, renderer
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ratchet.data.chat.builtin_tokenizers import byte_tokenizer
from ratchet.data.chat.renderer import Renderer
from ratchet.data.chat.tool_call_arguments import MAX_DEPTH
from ratchet.data.chat.tool_calls import FORMATS, find_tool_format, split_reasoning
from ratchet.errors import ConfigError
from ratchet.types import Message, ToolCall

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer"},
                    "b": {"type": "string"},
                    "c": {"type": "array"},
                },
            },
        },
    }
]
ADD = ("add", {"a": 2, "b": "é\n"})
JSON = '{"name": "add", "arguments": {"a": 2, "b": "é\\n"}}'
LLAMA = '{"name": "add", "parameters": {"a": 2, "b": "é\\n"}}'
XML = (
    "<function=add>\n<parameter=a>\n2\n</parameter>\n<parameter=b>\né\n\n</parameter>\n</function>"
)
V3 = (
    '<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{"a": 2, "b": '
    '"é\\n"}\n```<｜tool▁call▁end｜>'
)
V31 = '<｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 2, "b": "é\\n"}<｜tool▁call▁end｜>'
DSML = (
    '<｜DSML｜function_calls>\n<｜DSML｜invoke name="add">\n<｜DSML｜parameter name="a" '
    'string="false">2</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="b" '
    'string="true">é\n</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>'
)

GLM = (
    "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>2</arg_value>\n<arg_key>b</arg_key>\n"
    "<arg_value>é\n</arg_value>\n</tool_call>"
)
INVOKE = (
    '<invoke name="add">\n<parameter name="a">2</parameter>\n<parameter name="b">é\n</parameter>\n'
    "</invoke>\n"
)
KIMI = (
    '<|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{"a": 2, "b": "é\\n"}'
    "<|tool_call_end|>"
)
HARMONY = "<|channel|>commentary to=functions.add <|constrain|>json<|message|>"
THOUGHT = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
SECTION = "<|tool_calls_section_begin|>"
# The families of which a template is at hand that writes calls.
READ_BACK = ("qwen2.5", "qwen3", "qwen3-coder", "llama3", "mistral", "glm4.5", "kimi-k2", "gpt-oss")

READ = [
    ("glm", f"Now.\n{GLM}\n{GLM}", "Now.", [ADD, ADD]),
    ("glm", "<tool_call>f</tool_call>", "", [("f", {})]),
    ("minimax", f"Now.\n<minimax:tool_call>\n{INVOKE}{INVOKE}</minimax:tool_call>", "Now.", [ADD, ADD]),
    ("kimi", f"Now.{SECTION}{KIMI}{KIMI}<|tool_calls_section_end|>", "Now.", [ADD, ADD]),
    ("hermes", f"<tool_call>\n{JSON}\n</tool_call>", "", [ADD]),
    ("hermes", f"Let me.\n<tool_call>{JSON}</tool_call>\n<tool_call>\n{JSON}", "Let me.", [ADD, ADD]),
    ("hermes", f"<think>\n<tool_call>?\n</think>\n\n<tool_call>{JSON}</tool_call>", "<think>\n<tool_call>?\n</think>", [ADD]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>', "", [("f", {})]),
    ("qwen3_coder", f"Now.\n<tool_call>\n{XML}\n</tool_call>", "Now.", [ADD]),
    ("qwen3_coder", "<function=add><parameter=c>[1]</parameter><parameter=a>two</parameter></function>", "",
     [("add", {"c": [1], "a": "two"})]),
    ("llama", LLAMA, "", [ADD]),
    ("llama", f"<|python_tag|>{LLAMA}; {LLAMA}", "", [ADD, ADD]),
    ("llama", '<|python_tag|>brave_search.call(query="a \\"b\\"")', "", [("brave_search", {"query": 'a "b"'})]),
    ("llama", '[add(a=2, b="é\\n"), math.sin(x=-1.5e0, y=[True, None], z={"k": \'v\'},)]', "",
     [ADD, ("math.sin", {"x": -1.5, "y": [True, None], "z": {"k": "v"}})]),
    ("llama", "<|python_start|>[add()]<|python_end|>", "", [("add", {})]),
    ("llama", '[rate(from="EUR", note="a\nb")]', "", [("rate", {"from": "EUR", "note": "a\nb"})]),
    ("mistral", f"[TOOL_CALLS] [{JSON}, {JSON}]", "", [ADD, ADD]),
    ("mistral", 'Wait.[TOOL_CALLS]add[ARGS]{"a": 2, "b": '
                '"é\\n"}[TOOL_CALLS]add[CALL_ID]aaaaaaaaa[ARGS]{"a": 2, "b": "é\\n"}',
     "Wait.", [ADD, ADD]),
    ("mistral", '[TOOL_CALLS]add{"a": 2, "b": "é\\n"}', "", [ADD]),
    ("deepseek", f"Well.<｜tool▁calls▁begin｜>{V3}\n{V3}<｜tool▁calls▁end｜>", "Well.", [ADD, ADD]),
    ("deepseek", f"<think>\nhm\n</think>\n\n<｜tool▁calls▁begin｜>{V31}<｜tool▁calls▁end｜>", "<think>\nhm\n</think>", [ADD]),
    ("deepseek", f"Well.\n\n{DSML}", "Well.", [ADD]),
    ("harmony", f'{THOUGHT}{HARMONY}{{"a": 2, "b": "é\\n"}}<|call|>', "<think>hm</think>", [ADD]),
    ("harmony", ' to=functions.add<|channel|>commentary json<|message|>{}', "", [("add", {})]),
    ("harmony", f"<|channel|>commentary<|message|>Now.<|end|><|start|>assistant{HARMONY}{{}}<|call|>",
     "Now.", [("add", {})]),
]  # fmt: skip


@pytest.mark.parametrize(("family", "text", "content", "calls"), READ)
def test_calls_are_read_as_the_family_writes_them(family, text, content, calls):
    found = FORMATS[family].parse(text, TOOLS)
    assert (found.content, list(found.calls), found.malformed) == (content, calls, 0)


@pytest.mark.parametrize(
    ("family", "text"),
    [
        *[(family, "The answer is 4.") for family in FORMATS],
        ("llama", '{"name": "Bob"}'),
        ("llama", "[1, 2]"),
        ("llama", "print(4) is Python"),
        ("hermes", "<think>\nI could <tool_call> something"),  # reasoning that never ended
    ],
)
def test_what_is_no_call_stays_as_it_was(family, text):
    assert FORMATS[family].parse(text, TOOLS) == (text, (), 0)


MALFORMED = [
    ("glm", "<tool_call>add\n<arg_key>a</arg_key>\n2\n</tool_call>", 1),
    ("glm", "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>2</arg_value>", 1),
    ("minimax", f"<minimax:tool_call>\n{INVOKE}2</minimax:tool_call>", 1),
    ("minimax", "<minimax:tool_call>\n</minimax:tool_call>", 1),
    ("kimi", f"{SECTION}<|tool_call_begin|>functions.add:0<|tool_call_end|>", 1),
    ("kimi", f"{SECTION}<|tool_calls_section_end|>", 1),
    ("hermes", "<tool_call>add(2)</tool_call>", 1),
    ("hermes", f"{JSON}</tool_call>", 1),  # the opening was forgotten
    ("hermes", '<tool_call>{"name": "add"}</tool_call>', 1),
    ("hermes", '<tool_call>{"name": 3, "arguments": {}}</tool_call>', 1),
    ("hermes", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>', 1),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>', 1),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1e999}}</tool_call>', 1),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": "\\ud800"}}</tool_call>', 1),
    (
        "hermes",
        '<tool_call>{"name": "add", "arguments": {"a": ' + "[" * 40 + "]" * 40 + "}}</tool_call>",
        1,
    ),
    (
        "hermes",
        '<tool_call>{"name": "add", "arguments": {"a": ' + "[" * 100_000 + "</tool_call>",
        1,
    ),
    # then the good one is not a call either
    ("hermes", f"<tool_call>{JSON}</tool_call><tool_call></tool_call>", 1),
    ("qwen3_coder", "<tool_call>\nadd\n</tool_call>", 1),
    ("qwen3_coder", "<function=add><parameter=a>2</function>", 1),
    ("qwen3_coder", "<function=add>2</function>", 1),
    ("qwen3_coder", "<function=add><parameter=a>2</parameter>", 1),
    ("llama", '<|python_tag|>print("x")', 1),
    ("llama", '{"name": "add", "parameters": {"a": 2}', 1),
    ("llama", '{"name": "add", "parameters": 2}', 1),
    ("llama", "[add(2)]", 1),
    ("llama", "[add(a=x)]", 1),
    ("llama", "[add(a=" + "[" * 100_000 + ")]", 1),
    ("llama", "[add(a=" + "9" * 10_000 + ")]", 1),
    ("mistral", "[TOOL_CALLS]", 1),
    ("mistral", '[TOOL_CALLS] [{"name": "add"}, 3]', 2),
    ("mistral", "[TOOL_CALLS]add[ARGS]{", 1),
    ("mistral", "[TOOL_CALLS][ARGS]{}", 1),
    ("harmony", f"{HARMONY}{{<|call|>", 1),
    ("harmony", f"{HARMONY}[]<|call|>", 1),
    ("harmony", "<|channel|>commentary to=functions.add <|constrain|>json", 1),
    ("harmony", "<|channel|>analysis to=browser.search code<|message|>{}<|call|>", 1),
    ("deepseek", "<｜tool▁calls▁begin｜>", 1),
    ("deepseek", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{}\n```", 1),
    ("deepseek", "<｜tool▁call▁begin｜>add<｜tool▁call▁end｜>", 1),
    ("deepseek", '<｜DSML｜invoke name="add">', 1),
    (
        "deepseek",
        '<｜DSML｜invoke name="add"><｜DSML｜parameter name="a">2</｜DSML｜parameter></｜DSML｜invoke>',
        1,
    ),
]


@pytest.mark.parametrize(("family", "text", "malformed"), MALFORMED)
def test_what_can_not_be_read_is_counted_and_leaves_the_text_whole(family, text, malformed):
    assert FORMATS[family].parse(text, TOOLS) == (text, (), malformed)


MARKS = [
    "<tool_call>", "</tool_call>", "<function=", "</function>", "<parameter=", "</parameter>", "<|python_tag|>", "[TOOL_CALLS]",
    "[ARGS]", "[CALL_ID]", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>",
    "```json", "```", '<｜DSML｜invoke name="', "</｜DSML｜invoke>", '<｜DSML｜parameter name="',
    '" string="false">', "</｜DSML｜parameter>",
    "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<minimax:tool_call>", '<invoke name="', "</invoke>", '<parameter name="',
    SECTION, "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>",
    "<think>", "</think>", "[THINK]", "[/THINK]", JSON, LLAMA, HARMONY,
    "<|start|>", "assistant", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", " to=functions.add", "commentary", "analysis",
    "add(", "a=", '"', "'", "\\", "\\u", "{", "}", "[", "]", "(", ")",
    ",", ":", ";", "=", ">", "-", "1e5", "True", "None", '"name"', '"parameters"', "\x00", "\n", " ", "é", "\ud800",
]  # fmt: skip

WRITTEN = st.lists(st.one_of(st.sampled_from(MARKS), st.text(max_size=4)), max_size=30).map("".join)


@settings(max_examples=400)
@given(
    st.lists(st.one_of(st.sampled_from(MARKS), st.text(max_size=4)), max_size=30).map("".join),
    st.sampled_from(list(FORMATS)),
)
@example("[" * 5000 + "]" * 5000, "llama")
@example('{"a":' * 5000, "mistral")
def test_nothing_that_a_model_writes_raises(text, family):
    found = FORMATS[family].parse(text, TOOLS)
    assert not (found.calls and found.malformed)
    assert found.calls or found.content == text
    for name, given_ in found.calls:
        assert isinstance(name, str)
        assert name
        assert json.loads(json.dumps(given_, allow_nan=False)) == given_


@pytest.mark.parametrize("family", FORMATS)
def test_a_megabyte_of_white_space_in_a_call_is_read_at_once(family):
    openings = {
        "glm": "<tool_call>add<arg_key>a</arg_key>",
        "minimax": '<minimax:tool_call><invoke name="add">',
        "kimi": "<|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>",
    }
    text = openings.get(family, "<tool_call>") + " " * 2**20 + "x</tool_call></invoke>"
    assert FORMATS[family].parse(text, TOOLS).calls == ()


def test_arguments_may_be_nested_but_not_without_end():
    nested = {"a": {}}
    for _ in range(MAX_DEPTH - 4):
        nested = {"a": nested}
    text = f"<tool_call>{json.dumps({'name': 'f', 'arguments': nested})}</tool_call>"
    assert FORMATS["hermes"].parse(text).calls == (("f", nested),)


def test_reasoning():
    assert split_reasoning("<think>a</think>b") == ("<think>a</think>", "b")
    assert split_reasoning("a</think>b") == ("a</think>", "b")  # the prompt opened it
    assert split_reasoning("[THINK]a[/THINK]b") == ("[THINK]a[/THINK]", "b")
    assert split_reasoning("<think>a") == ("<think>a", "")
    assert split_reasoning("b") == ("", "b")


def test_the_format_is_told_from_the_template_and_else_from_the_tokens():
    told = {
        "qwen2.5": "hermes",
        "qwen3": "hermes",
        "qwen3-coder": "qwen3_coder",
        "llama3": "llama",
        "mistral": "mistral",
        "deepseek-r1": "deepseek",
        "glm4.5": "glm",
        "minimax-m2": "minimax",
        "kimi-k2": "kimi",
        "gpt-oss": "harmony",
    }
    assert {family: renderer(family).tool_format.name for family in told} == told
    assert find_tool_format("auto", "<tool_call>\n<function=name>", {}).name == "qwen3_coder"
    assert find_tool_format("auto", "", {"[TOOL_CALLS]": 5}).name == "mistral"
    assert find_tool_format("llama", "<tool_call>", {}).name == "llama"
    for family in FAMILIES.keys() - told.keys():
        with pytest.raises(
            ConfigError, match=r"set tokenizer.tool_format to deepseek, mistral.*tokenizer.template"
        ):
            _ = renderer(family).tool_format
    with pytest.raises(ConfigError, match="there is no 'hermis'"):
        find_tool_format("hermis", "", {})


# --- through tokens


@pytest.mark.parametrize("family", [*READ_BACK, "turns", "chatml"])
def test_what_the_template_writes_as_a_call_is_read_back_and_goes_on(family):
    own = family in ("turns", "chatml")
    made = Renderer(byte_tokenizer(), family) if own else renderer(family)
    call_id = {"mistral": "call00000", "kimi-k2": "functions.add:0"}.get(family, "call_0")
    user, called = (
        Message("user", "2 + 2?"),
        Message("assistant", "", (ToolCall(call_id, "add", {"a": 2, "b": "é"}),)),
    )
    tokens, trainable = made.supervised([user, called], TOOLS, train="last")
    sampled = [token for token, trains in zip(tokens, trainable, strict=True) if trains]
    message, malformed = made.parse_calls(sampled, tools=TOOLS)
    assert malformed == 0
    assert message.tool_calls == called.tool_calls
    assert message.text.strip() in ("", "<think>", "<think>\n\n</think>")


def test_calls_that_would_be_malformed_are_refused_at_the_start():
    for family in (*READ_BACK, "minimax-m2", "deepseek-r1"):
        renderer(family).check_tool_calls()
    glm = renderer("glm4.5")
    source = glm.template.source
    with pytest.raises(ConfigError, match=r"tool_format=hermes does not read the tool calls that.*"
                       r"<tool_call>look_up.*one of deepseek"):  # fmt: skip
        Renderer(glm.tokenizer, source, tool_format="hermes").check_tool_calls()
    with pytest.raises(ConfigError, match=r"can't write a tool call: .*does not write tool calls"):
        Renderer(renderer("llama2").tokenizer, tool_format="hermes").check_tool_calls()


def test_a_dialogue_with_tools_extends_what_was_sampled_token_by_token():
    made = Renderer(renderer("qwen2.5").tokenizer, "chatml")
    prompt = made.prompt([Message("user", "2 + 2?")], TOOLS)
    # not as the template spaces it
    written = 'Hm.\n<tool_call>{"name":"add",  "arguments":{"a":2}}</tool_call>'
    sampled = [*made.tokenizer.encode(written), made.tokenizer.special_ids["<|im_end|>"]]
    message, _ = made.parse_calls(sampled, tools=TOOLS)
    history, answers = [Message("user", "2 + 2?")], [Message("tool", "4", tool_call_id="call_0")]
    assert made.keeps_turn(sampled, answers, history=history, reply=message, tools=TOOLS)
    added = made.extend(sampled, answers, history=history, tools=TOOLS)
    assert (
        made.tokenizer.decode(added, skip_special=False)
        == "\n<|im_start|>tool\n4<|im_end|>\n<|im_start|>assistant\n"
    )
    assert "<tools>" in made.tokenizer.decode(prompt)


@pytest.mark.parametrize(
    ("family", "said", "answer", "kept"),
    [
        ("qwen2.5", "<think>\nr\n</think>\n\na", Message("user", "and?"), True),
        # drops the reasoning
        ("qwen3", "<think>\nr\n</think>\n\na", Message("user", "and?"), False),
        ("qwen3", "a", Message("user", "and?"), True),  # there was none to drop
        ("deepseek-r1", "r\n</think>\n\na", Message("user", "and?"), False),
        # it trims, and the tokens stay as they were sampled
        ("llama3", "a ", Message("user", "and?"), True),
    ],
)
def test_a_turn_that_the_template_rewrites_forks_the_history(family, said, answer, kept):
    made = renderer(family)
    history = [Message("user", "q")]
    sampled = [*made.tokenizer.encode(said), made.stop_ids[0]]
    message = made.parse(sampled)
    assert made.keeps_turn(sampled, [answer], history=history, reply=message) == kept


def test_a_tools_answer_keeps_the_reasoning_before_the_call():
    made = renderer("qwen3")
    sampled = [
        *made.tokenizer.encode(f"<think>\nr\n</think>\n\n<tool_call>\n{JSON}\n</tool_call>"),
        made.stop_ids[0],
    ]
    message, _ = made.parse_calls(sampled, tools=TOOLS)
    history, result = [Message("user", "q")], Message("tool", "4", tool_call_id="call_0")
    assert made.keeps_turn(sampled, [result], history=history, reply=message, tools=TOOLS)
    assert not made.keeps_turn(
        sampled, [result, Message("user", "and?")], history=history, reply=message, tools=TOOLS
    )
