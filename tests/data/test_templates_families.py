"""The chat formats of nine model families: what trains is marked by hand as «...», ids are those of
transformers.

The templates in tests/data/templates/ are our own texts for the published formats.
"""

from functools import cache
from pathlib import Path

import pytest

from ratchet.data.chat.builtin_tokenizers import byte_bpe_tokenizer
from ratchet.data.chat.chat_templates import ChatTemplate
from ratchet.data.chat.renderer import Renderer
from ratchet.data.chat.tokenizer import Tokenizer
from ratchet.errors import DataError
from ratchet.types import Message, StopReason, ToolCall

TEMPLATES = Path(__file__).parent / "templates"
CORPUS = [
    "the answer is yes, user and assistant\n\n",
    "what is 2+2? it is 4.\n",
    "think think tool tool system\n<think>\n",
] * 50

DEEPSEEK_TOOLS = ("calls▁begin", "call▁begin", "sep", "call▁end", "calls▁end")
DEEPSEEK_TOOLS += ("outputs▁begin", "output▁begin", "output▁end", "outputs▁end")

# family: (special tokens, bos, eos, template variables)
FAMILIES = {
    "llama3": (
        (
            "<|begin_of_text|>",
            "<|start_header_id|>",
            "<|end_header_id|>",
            "<|eot_id|>",
            "<|eom_id|>",
        ),
        "<|begin_of_text|>",
        "<|eot_id|>",
        {"date_string": "26 Jul 2024"},
    ),
    "qwen2.5": (("<|im_start|>", "<|im_end|>", "<|endoftext|>"), None, "<|im_end|>", {}),
    "qwen3": (("<|im_start|>", "<|im_end|>", "<|endoftext|>"), None, "<|im_end|>", {}),
    "qwen3-coder": (("<|im_start|>", "<|im_end|>", "<|endoftext|>"), None, "<|im_end|>", {}),
    "mistral": (
        ("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        "<s>",
        "</s>",
        {},
    ),
    "gemma": (("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), "<bos>", "<eos>", {}),
    "phi3": (
        ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|endoftext|>"),
        None,
        "<|endoftext|>",
        {},
    ),
    "zephyr": (("<s>", "</s>"), "<s>", "</s>", {}),
    "llama2": (("<s>", "</s>"), "<s>", "</s>", {}),
    "deepseek-r1": (
        (
            "<BOS>",
            "<EOS>",
            "<｜User｜>",
            "<｜Assistant｜>",
            *(f"<｜tool▁{name}｜>" for name in DEEPSEEK_TOOLS),
        ),
        "<BOS>",
        "<EOS>",
        {},
    ),
    "glm4.5": (
        (
            "[gMASK]",
            "<sop>",
            "<|endoftext|>",
            *(f"<|{role}|>" for role in ("system", "user", "assistant", "observation")),
            *("<think>", "</think>", "<tool_call>", "</tool_call>"),
            *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        ),
        None,
        "<|endoftext|>",
        {},
    ),
    "minimax-m2": (
        ("]~!b[", "]~b]", "[e~[", "<minimax:tool_call>", "</minimax:tool_call>"),
        "]~!b[",
        "[e~[",
        {},
    ),
    "kimi-k2": (
        (
            *(f"<|im_{name}|>" for name in ("system", "user", "assistant", "middle", "end")),
            *(f"<|tool_{name}|>" for name in ("calls_section_begin", "calls_section_end")),
            *(f"<|tool_call_{name}|>" for name in ("begin", "argument_begin", "end")),
        ),
        None,
        "<|im_end|>",
        {},
    ),
    "gpt-oss": (
        tuple(
            f"<|{name}|>"
            for name in ("start", "end", "message", "channel", "constrain", "return", "call")
        ),
        None,
        "<|return|>",
        {},
    ),
}
OPENED = ("deepseek-r1", "minimax-m2")  # the prompt opens the reasoning


@cache
def tokenizer(family: str) -> Tokenizer:
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Backend

    specials, bos, eos, _ = FAMILIES[family]
    backend = Backend.from_str(byte_bpe_tokenizer(CORPUS, 400)._backend.to_str())
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in specials])
    # as Qwen3 has
    backend.add_tokens(
        [AddedToken("<think>", normalized=False), AddedToken("</think>", normalized=False)]
    )
    config = {"eos_token": eos} | ({"bos_token": bos} if bos else {})
    template = (TEMPLATES / f"{family}.jinja").read_text(encoding="utf-8")
    return Tokenizer(backend, config=config, chat_template=template)


@cache
def renderer(family: str) -> Renderer:
    return Renderer(tokenizer(family), variables=FAMILIES[family][3])


def marked(family: str, tokens, trainable) -> str:
    """The text of a row, what trains between « and »."""
    text, run, training = "", [], False
    for token, trains in [*zip(tokens, trainable, strict=True), (None, False)]:
        if trains != training or token is None:
            said = tokenizer(family).decode(run, skip_special=False)
            text += f"«{said}»" if training else said
            run, training = [], trains
        run.append(token)
    return text


SYSTEM, USER, YES = (
    Message("system", "Be brief."),
    Message("user", "Is it?"),
    Message("assistant", "yes"),
)
MORE, NO = Message("user", "And now?"), Message("assistant", "no")
CALL = Message("assistant", "", (ToolCall("abcdefghi", "add", {"a": 2, "b": "é"}),))
RESULT = Message("tool", "4", tool_call_id="abcdefghi")
LLAMA3 = (
    "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n"
    "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n"
)
QWEN = (
    "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful "
    "assistant.<|im_end|>\n"
)
TWO_TURNS, WITH_SYSTEM = [USER, YES, MORE, NO], [SYSTEM, USER, YES]
WITH_TOOL = [USER, CALL, RESULT, YES]

EXPECTED = [
    (
        "llama3",
        TWO_TURNS,
        LLAMA3 + "<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nIs it?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n«yes<|eot_id|>»"
        "<|start_header_id|>user<|end_header_id|>\n\nAnd now?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n«no<|eot_id|>»",
    ),
    (
        "llama3",
        WITH_SYSTEM,
        LLAMA3 + "Be brief.<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nIs it?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n«yes<|eot_id|>»",
    ),
    (
        "llama3",
        WITH_TOOL,
        LLAMA3 + "<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nIs it?<|eot_id|>"
        '<|start_header_id|>assistant<|end_header_id|>\n\n«{"name": "add", "parameters": {"a": 2, '
        '"b": "é"}}<|eot_id|>»'
        '<|start_header_id|>ipython<|end_header_id|>\n\n"4"<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n«yes<|eot_id|>»',
    ),
    (
        "qwen2.5",
        TWO_TURNS,
        QWEN + "<|im_start|>user\nIs it?<|im_end|>\n<|im_start|>assistant\n«yes<|im_end|>»\n"
        "<|im_start|>user\nAnd now?<|im_end|>\n<|im_start|>assistant\n«no<|im_end|>»",
    ),
    (
        "qwen2.5",
        WITH_SYSTEM,
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nIs "
        "it?<|im_end|>\n<|im_start|>assistant\n«yes<|im_end|>»",
    ),
    (
        "qwen3",
        WITH_SYSTEM,
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nIs it?<|im_end|>\n"
        "<|im_start|>assistant\n«<think>\n\n</think>\n\nyes<|im_end|>»",
    ),
    (
        "mistral",
        TWO_TURNS,
        "<s>[INST] Is it?[/INST]« yes</s>»[INST] And now?[/INST]« no</s>»",
    ),
    ("mistral", WITH_SYSTEM, "<s>[INST] Be brief.\n\nIs it?[/INST]« yes</s>»"),
    (
        "mistral",
        WITH_TOOL,
        '<s>[INST] Is it?[/INST]«[TOOL_CALLS] [{"name": "add", "arguments": {"a": 2, "b": "é"}, '
        '"id": "abcdefghi"}]</s>»'
        '[TOOL_RESULTS] {"content": 4, "call_id": "abcdefghi"}[/TOOL_RESULTS]« yes</s>»',
    ),
    (
        "gemma",
        TWO_TURNS,
        "<bos><start_of_turn>user\nIs it?<end_of_turn>\n<start_of_turn>model\n«yes<end_of_turn>»\n"
        "<start_of_turn>user\nAnd now?<end_of_turn>\n<start_of_turn>model\n«no<end_of_turn>»",
    ),
    (
        "phi3",
        TWO_TURNS,
        "<|user|>\nIs it?<|end|>\n<|assistant|>\n«yes<|end|>»\n<|user|>\nAnd "
        "now?<|end|>\n<|assistant|>\n«no<|end|>»",
    ),
    (
        "phi3",
        WITH_SYSTEM,
        "<|system|>\nBe brief.<|end|>\n<|user|>\nIs it?<|end|>\n<|assistant|>\n«yes<|end|>»",
    ),
    (
        "zephyr",
        TWO_TURNS,
        "<|user|>\nIs it?</s>\n<|assistant|>\n«yes</s>»\n<|user|>\nAnd "
        "now?</s>\n<|assistant|>\n«no</s>»",
    ),
    (
        "zephyr",
        WITH_SYSTEM,
        "<|system|>\nBe brief.</s>\n<|user|>\nIs it?</s>\n<|assistant|>\n«yes</s>»",
    ),
    (
        "llama2",
        TWO_TURNS,
        "<s>[INST] Is it? [/INST]« yes </s>»<s>[INST] And now? [/INST]« no </s>»",
    ),
    ("llama2", WITH_SYSTEM, "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nIs it? [/INST]« yes </s>»"),
]


@pytest.mark.parametrize(
    ("family", "messages", "expected"),
    EXPECTED,
    ids=[f"{f}-{len(m)}-{m[0].role}" for f, m, _ in EXPECTED],
)
def test_every_turn_of_the_assistant_trains_and_nothing_else(family, messages, expected):
    assert marked(family, *renderer(family).supervised(messages, train="all")) == expected


LAST = [
    (  # earlier reasoning is dropped; the row still trains the last turn as it is sampled
        "qwen3",
        [
            USER,
            Message("assistant", "<think>\nwell\n</think>\n\nyes"),
            MORE,
            Message("assistant", "<think>\nhm\n</think>\n\nno"),
        ],
        "<|im_start|>user\nIs "
        "it?<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n<|im_start|>user\nAnd "
        "now?<|im_end|>\n"
        "<|im_start|>assistant\n«<think>\nhm\n</think>\n\nno<|im_end|>»",
    ),
    (
        "deepseek-r1",
        [SYSTEM, USER, YES, MORE, Message("assistant", "<think>\nhm\n</think>\n\nno")],
        "<BOS>Be brief.<｜User｜>Is it?<｜Assistant｜>yes<EOS>"
        "<｜User｜>And now?<｜Assistant｜><think>\n«hm\n</think>\n\nno<EOS>»",
    ),
    (
        "deepseek-r1",
        [USER, CALL, RESULT, YES],
        "<BOS><｜User｜>Is "
        "it?<｜Assistant｜><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n"
        '```json\n{"a": 2, "b": "é"}'
        "\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜><EOS><｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>4<｜tool▁output▁end｜>"
        "<｜tool▁outputs▁end｜>«yes<EOS>»",
    ),
    (  # the published template shows the system message only in the last user turn
        "mistral",
        [SYSTEM, *TWO_TURNS],
        "<s>[INST] Is it?[/INST] yes</s>[INST] Be brief.\n\nAnd now?[/INST]« no</s>»",
    ),
    ("llama2", TWO_TURNS, "<s>[INST] Is it? [/INST] yes </s><s>[INST] And now? [/INST]« no </s>»"),
]


@pytest.mark.parametrize(("family", "messages", "expected"), LAST)
def test_only_the_last_turn_trains(family, messages, expected):
    assert marked(family, *renderer(family).supervised(messages, train="last")) == expected


def test_a_tool_call_in_between_keeps_qwen3s_reasoning():
    call = Message("assistant", "<think>\nadd\n</think>\n\n", CALL.tool_calls)
    row = renderer("qwen3").supervised(
        [USER, call, RESULT, Message("assistant", "<think>\nok\n</think>\n\n4")], train="all"
    )
    assert marked("qwen3", *row) == (
        "<|im_start|>user\nIs it?<|im_end|>\n<|im_start|>assistant\n"
        '«<think>\nadd\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": '
        '"é"}}\n</tool_call><|im_end|>»\n'
        "<|im_start|>user\n<tool_response>\n4\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
        "«<think>\nok\n</think>\n\n4<|im_end|>»"
    )


@pytest.mark.parametrize(
    ("family", "messages", "turn"),
    [
        ("qwen3", TWO_TURNS, 1),
        ("mistral", [SYSTEM, *TWO_TURNS], 2),
        (
            "deepseek-r1",
            [
                USER,
                Message("assistant", "<think>\na</think>b"),
                MORE,
                Message("assistant", "<think>\nc</think>d"),
            ],
            1,
        ),
    ],
)
def test_a_rewritten_turn_is_refused_by_number_with_the_fix(family, messages, turn):
    with pytest.raises(DataError, match=f'message {turn}: .*rewrites this turn.*train="last"'):
        renderer(family).supervised(messages, train="all")
    assert renderer(family).rewritten_turns([*messages, USER])[0] == turn


def test_reasoning_that_the_prompt_opens_must_be_in_the_text():
    with pytest.raises(
        DataError, match=r"message 1: .*prompt ends with '<think>\\n'.*put it before the text"
    ):
        renderer("deepseek-r1").supervised([USER, YES], train="last")


@pytest.mark.parametrize("family", FAMILIES)
def test_which_families_extend_their_history(family):
    assert renderer(family).extends_history is (
        family not in ("qwen3", "glm4.5", "gpt-oss", *OPENED)
    )


STOPS = {
    "llama3": ["<|eot_id|>"],
    "gemma": ["<eos>", "<end_of_turn>"],
    "phi3": ["<|endoftext|>", "<|end|>"],
    "llama2": ["</s>"],
    "qwen3": ["<|im_end|>"],
}


@pytest.mark.parametrize(("family", "stops"), STOPS.items())
def test_stop_ids_are_eos_and_the_end_of_the_turn(family, stops):
    assert renderer(family).stop_ids == tuple(tokenizer(family).token_id(stop) for stop in stops)


# --- sampling and training agree


def conversations(family: str) -> list[list[Message]]:
    """What this family can hold, up to an answer."""
    first = [USER] if family == "gemma" else [SYSTEM, USER]
    return [[USER], first, [USER, YES, MORE]] + (
        [[USER, CALL, RESULT]]
        if family in ("llama3", "qwen2.5", "qwen3", "mistral", "gpt-oss")
        else []
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_a_supervised_row_is_the_prompt_then_the_answer_then_the_end_of_turn(family):
    model, tok = renderer(family), tokenizer(family)
    said = {
        "deepseek-r1": "<think>\nhm\n\n</think>\n\n\n the  answer",
        "minimax-m2": "<think>\nhm\n</think>\n\nthe  answer",
    }.get(family, "the  answer")
    written = {
        **dict.fromkeys(OPENED, said.removeprefix("<think>\n")),
        "qwen3": f"<think>\n\n</think>\n\n{said}",
        "glm4.5": f"\n<think></think>\n{said}",
    }.get(family, said)
    if family == "gpt-oss":
        written = f"<|channel|>final<|message|>{said}"
    written = {"mistral": f" {said}", "llama2": f" {said} "}.get(family, written)
    for messages in conversations(family):
        # After gpt-oss's end of turn comes that of its calls.
        end = model.stop_ids[0 if family == "gpt-oss" else -1]
        tokens, trainable = model.supervised([*messages, Message("assistant", said)], train="last")
        prompt = model.prompt(messages)
        answer = tok.encode(written, after="text", allow_special=family == "gpt-oss")
        assert tokens == [*prompt, *answer, end]
        assert trainable == [False] * len(prompt) + [True] * (len(answer) + 1)
        assert model.parse(tokens[len(prompt) :], StopReason.STOP_TOKEN).text.strip() == said


@pytest.mark.parametrize("family", FAMILIES)
def test_the_seam_holds_where_a_merge_would_cross_it(family):
    """ "\\n\\n" is one token of this vocabulary; an answer that begins with a line break must not
    join the header's."""
    tok = tokenizer(family)
    assert len(tok.encode("\n\n")) == 1
    said = Message("assistant", "<think>\n\nx</think>y" if family in OPENED else "\nx")
    tokens, trainable = renderer(family).supervised([USER, said], train="last")
    assert tokens[: trainable.index(True)] == renderer(family).prompt([USER])


@pytest.mark.parametrize(
    "family", ["llama3", "qwen2.5", "mistral", "gemma", "phi3", "zephyr", "llama2"]
)
def test_sampling_turn_by_turn_gives_the_tokens_of_the_supervised_row(family):
    model = renderer(family)
    row, trainable = model.supervised([*TWO_TURNS, USER, YES], train="all")
    grown = model.prompt([USER])
    for answer, following in ((YES, [MORE]), (NO, [USER]), (YES, None)):
        start = len(grown)
        end = next((i for i in range(start, len(row)) if not trainable[i]), len(row))
        assert row[:start] == grown
        sampled = row[start:end]
        assert model.parse(sampled, StopReason.STOP_TOKEN).text.strip() == answer.text
        grown = [*grown, *sampled]
        if following is not None:
            for cut in (len(sampled), len(sampled) - 1):  # ended by its stop token, or before it
                if family != "llama2" or cut == len(sampled):
                    assert [*sampled[:cut], *model.extend(sampled[:cut], following)] == [
                        *sampled,
                        *model.extend(sampled, following),
                    ]
            grown += model.extend(sampled, following)
    assert grown == row


def test_tool_results_extend_a_qwen3_turn_as_its_template_has_it():
    model, tok = renderer("qwen3"), tokenizer("qwen3")
    sampled = [
        *tok.encode("<think>\nx\n</think>\n\n<tool_call>\n{}\n</tool_call>"),
        tok.token_id("<|im_end|>"),
    ]
    added = model.extend(sampled, [RESULT, Message("tool", "5", tool_call_id="b")])
    assert tok.decode(added, skip_special=False) == (
        "\n<|im_start|>user\n<tool_response>\n4\n</tool_response>\n<tool_response>\n5\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


def test_tool_results_extend_a_mistral_turn_without_a_header():
    added = renderer("mistral").extend([5, tokenizer("mistral").token_id("</s>")], [RESULT])
    assert tokenizer("mistral").decode(added, skip_special=False) == (
        '[TOOL_RESULTS] {"content": 4, "call_id": "abcdefghi"}[/TOOL_RESULTS]'
    )


def test_variables_reach_the_template():
    quiet = Renderer(tokenizer("qwen3"), variables={"enable_thinking": False})
    row = quiet.supervised([USER, YES], train="last")
    assert marked("qwen3", *row) == (
        "<|im_start|>user\nIs "
        "it?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n«yes<|im_end|>»"
    )


# --- transformers

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "d",
            "parameters": {"type": "object", "properties": {}},
        },
    }
]


def as_dictionaries(messages: list[Message]) -> list[dict]:
    made = []
    for message in messages:
        item: dict = {"role": message.role, "content": message.text}
        if message.tool_calls:
            function = {"name": "add", "arguments": dict(message.tool_calls[0].arguments)}
            item["tool_calls"] = [{"id": "abcdefghi", "type": "function", "function": function}]
        if message.tool_call_id:
            item["tool_call_id"] = message.tool_call_id
        made.append(item)
    return made


@pytest.mark.parametrize("family", FAMILIES)
def test_text_and_ids_are_those_of_transformers(family, tmp_path):
    from transformers import AutoTokenizer

    ours, model = tokenizer(family), renderer(family)
    ours.save(tmp_path)
    theirs, variables = AutoTokenizer.from_pretrained(tmp_path), FAMILIES[family][3]
    for messages in conversations(family):
        for tools in (None, TOOLS):
            plain = as_dictionaries(messages)
            text = theirs.apply_chat_template(
                plain, tools=tools, tokenize=False, add_generation_prompt=True, **variables
            )
            assert model.template.render(messages, tools, prompt=True) == text
            ids = theirs.apply_chat_template(
                plain, tools=tools, add_generation_prompt=True, return_dict=False, **variables
            )
            assert model.prompt(messages, tools) == ids


def test_the_templates_are_compiled_as_transformers_compiles_them():
    """Statements on their own lines leave no line breaks, generation blocks and break are
    understood."""
    from datetime import datetime

    source = (
        "{% for m in messages %}\n  {% if loop.index > 2 %}\n{% break %}\n  {% endif %}\n"
        "{% generation %}\n{{ m.content }}\n{% endgeneration %}\n{% endfor %}\n{{ "
        "strftime_now('%Y') }}"
        '{{ {"a": "<é>"} | tojson }}'
    )
    said = ChatTemplate(source, {}, datetime(2031, 5, 6)).render(
        [USER, YES, MORE], None, prompt=False
    )
    assert said == 'Is it?\nyes\n2031{"a": "<é>"}'
