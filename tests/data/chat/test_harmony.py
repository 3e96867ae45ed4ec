"""gpt-oss's format as OpenAI's own package writes and reads it, with the real vocabulary."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands.clients.test_clients import CLIENTS
from data.chat.test_tool_calls import TOOLS
from data.test_templates_families import renderer

from ratchet.data.chat.harmony import read_harmony, split_turn
from ratchet.data.chat.thinking import mark_thought
from ratchet.types import Message, StopReason, ToolCall

pytestmark = pytest.mark.needs("openai_harmony")
THOUGHT = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
CALLED = "<|channel|>commentary to=functions.add <|constrain|>json<|message|>"
TURNS = [
    THOUGHT + "<|channel|>final<|message|>yes<|return|>",
    f'{THOUGHT}{CALLED}{{"a": 2}}<|call|>',
    THOUGHT + ' to=functions.add<|channel|>commentary json<|message|>{"a": 2}<|call|>',
    f"<|channel|>commentary<|message|>Now.<|end|><|start|>assistant{CALLED}{{}}<|call|>",
    f"{CALLED}{{}}<|end|><|start|>assistant{CALLED}{{}}<|call|>",
    "<|channel|>analysis to=browser.search code<|message|>{}<|call|>",
    "<|channel|>commentary to=functions.add<|message|>{}<|call|>",
    "<|message|>hi<|return|>",
]
# litellm comes with the vocabulary under the name that tiktoken's cache gives it.
VOCABULARY = "site-packages/litellm/litellm_core_utils/tokenizers"
VOCABULARY += "/fb374d419588a4632f3f557e76b4b70aebbca790"


@pytest.fixture
def encoding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, require: Callable[[str, str], None]
) -> Any:
    from openai_harmony import HarmonyEncodingName, load_harmony_encoding

    require(str(CLIENTS), "make .venv/clients/installed")
    (vocabulary,) = CLIENTS.parents[1].glob(f"lib/python*/{VOCABULARY}")
    shutil.copy(vocabulary, tmp_path / "o200k_base.tiktoken")
    monkeypatch.setenv("TIKTOKEN_ENCODINGS_BASE", str(tmp_path))
    return load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)


@pytest.mark.slow
def test_turns_are_read_as_by_openai_harmony(encoding: Any) -> None:
    from openai_harmony import Role

    for text in TURNS:
        tokens = encoding.encode(text, allowed_special="all")
        expected = [
            (message.channel or "", message.recipient or "", message.content[0].text, True)
            for message in encoding.parse_messages_from_completion_tokens(tokens, Role.ASSISTANT)
        ]
        assert split_turn(text) == expected


@pytest.mark.slow
def test_a_conversation_is_written_as_by_openai_harmony(encoding: Any) -> None:
    from openai_harmony import (
        Author,
        Conversation,
        DeveloperContent,
        Role,
        SystemContent,
        ToolDescription,
    )
    from openai_harmony import Message as Written

    function = TOOLS[0]["function"]
    tool = ToolDescription.new("add", function["description"], parameters=function["parameters"])
    developer = DeveloperContent.new().with_instructions("Be brief.").with_function_tools([tool])
    call = Written.from_role_and_content(Role.ASSISTANT, '{"a": 2}').with_channel("commentary")
    tool_author = Author.new(Role.TOOL, "functions.add")
    conversation = [
        Written.from_role_and_content(Role.SYSTEM, SystemContent.new()),
        Written.from_role_and_content(Role.DEVELOPER, developer),
        Written.from_role_and_content(Role.USER, "2?"),
        Written.from_role_and_content(Role.ASSISTANT, "hm").with_channel("analysis"),
        call.with_recipient("functions.add").with_content_type("json"),
        Written.from_author_and_content(tool_author, "4")
        .with_channel("commentary")
        .with_recipient("assistant"),
    ]
    tokens = encoding.render_conversation_for_completion(
        Conversation.from_messages(conversation), Role.ASSISTANT
    )
    messages = [
        Message("system", "Be brief."),
        Message("user", "2?"),
        Message("assistant", mark_thought("hm"), (ToolCall("call_0", "add", {"a": 2}),)),
        Message("tool", "4", tool_call_id="call_0"),
    ]
    model = renderer("gpt-oss")
    text = model.tokenizer.decode(model.prompt(messages, TOOLS), skip_special=False)
    assert text == encoding.decode(tokens)


def test_a_turn_is_parsed_without_its_marks() -> None:
    model = renderer("gpt-oss")
    encode = model.tokenizer.encode
    for text, content in (
        (TURNS[0], "<think>hm</think>yes"),
        ("<|channel|>final<|message|>yes", "yes"),
        ("no channel", "no channel"),
    ):
        tokens = encode(text, allow_special=True)
        assert model.parse(tokens).text == content
        assert model.parse_calls(tokens, tools=TOOLS) == (Message("assistant", content), 0)
    assert {"<|return|>", "<|call|>"} == {
        model.tokenizer.decode([token], skip_special=False) for token in model.stop_ids
    }
    assert read_harmony("", ()) == ("", [])


def test_a_thought_cut_within_a_character_ends_before_it() -> None:
    model = renderer("gpt-oss")
    tokens = model.tokenizer.encode(
        "<|channel|>analysis<|message|>hm\U0001f642", allow_special=True
    )
    assert model.parse(tokens[:-1], StopReason.LENGTH).text == "<think>hm</think>"


def test_a_thought_and_a_text_beside_a_call_are_both_written() -> None:
    model = renderer("gpt-oss")
    call = (ToolCall("call_0", "add", {"a": 2}),)
    messages = [
        Message("user", "2?"),
        Message("assistant", f"{mark_thought('hm')}yes"),
        Message("user", "3?"),
        Message("assistant", f"{mark_thought('oh')}Now.", call),
    ]
    prompt = model.prompt([*messages, Message("tool", "4", tool_call_id="call_0")], TOOLS)
    text = model.tokenizer.decode(prompt, skip_special=False)
    assert "<|channel|>final<|message|>yes<|end|>" in text
    assert "hm" not in text
    assert (
        "<|channel|>analysis<|message|>oh\nNow.<|end|><|start|>assistant to=functions.add" in text
    )
