"""Which turns have malformed thinking, and that a thought is read back as it was written."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ratchet.data.chat.harmony import move_thoughts, read_text
from ratchet.data.chat.thinking import has_malformed_thinking, mark_thought, split_thinking

PIECES = [
    "<think>",
    "</think>",
    "[THINK]",
    "[/THINK]",
    "<",
    "[",
    "\u2060",
    "/think>",
    "\n",
    " ",
    "a",
]
TEXTS = st.lists(st.sampled_from(PIECES)).map("".join)


@pytest.mark.parametrize(
    ("text", "is_malformed"),
    [
        ("an answer", False),
        ("<think>why</think>an answer", False),
        ("\n<think></think>", False),
        ("[THINK]why[/THINK]an answer", False),
        ("<think>why", True),
        ("why</think>an answer", True),
        ("an answer<think>why</think>", True),
        ("<think>why</think>an</think>swer", True),
        ("<think>a</think><think>b</think>c", True),
        ("<think>why[/THINK]an answer", True),
        ("</think><think>", True),
    ],
)
def test_marks_of_one_thought_at_the_beginning(text: str, is_malformed: bool) -> None:
    assert has_malformed_thinking(text, cut=False) is is_malformed


def test_a_token_limit_may_cut_a_thought_but_excuses_nothing_else() -> None:
    assert not has_malformed_thinking("<think>why", cut=True)
    assert has_malformed_thinking("an answer<think>why", cut=True)
    assert has_malformed_thinking("<think>a</think><think>b", cut=True)


@given(TEXTS, TEXTS)
@settings(max_examples=50)
@example("use </think> or <\u2060/think>", "yes</think>no")
def test_a_thought_of_any_text_is_read_back(thought: str, answer: str) -> None:
    marked = mark_thought(thought)
    assert split_thinking(marked + answer) == (thought, answer.lstrip())
    assert not has_malformed_thinking(marked, cut=False)


@given(TEXTS)
@settings(max_examples=20)
@example("I close it with </think>, then go on")
def test_gpt_oss_s_thoughts_keep_their_marks(thought: str) -> None:
    turn = f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant"
    message = {"role": "assistant", "content": read_text(f"{turn}<|channel|>final<|message|>yes")}
    move_thoughts([message])
    assert message == {"role": "assistant", "content": "yes"} | (
        {"thinking": thought} if thought else {}
    )
