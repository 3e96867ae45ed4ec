"""Which turns have malformed thinking."""

from __future__ import annotations

import pytest

from ratchet.data.chat.thinking import has_malformed_thinking


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
