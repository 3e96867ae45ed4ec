"""Changes that make a request of the chat or of text completions one that can't be answered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

USER = {"role": "user", "content": "hi"}
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
FUNCTION = {"type": "function", "function": {"name": "f"}}


def messages(*values: Any) -> dict[str, Any]:
    return {"messages": [USER, *values]}


def calls(**changes: Any) -> dict[str, Any]:
    return messages({"role": "assistant", "tool_calls": [{**CALL, **changes}]}, USER)


def parts(*values: Any) -> dict[str, Any]:
    return messages({"role": "user", "content": list(values)})


# Sampling parameters that no API accepts.
WRONG_SAMPLING: Sequence[dict[str, Any]] = [
    {"temperature": "1"},
    {"temperature": -1},
    {"temperature": 0.2},
    {"top_p": 0.5},
    {"top_p": "1"},
    {"top_k": 5},
    {"top_k": -2},
    {"top_k": 1.5},
    {"min_p": 0.5},
    {"seed": "x"},
    {"seed": 1.5},
    {"n": 2},
    {"n": 0},
    {"stop": [""]},
    {"stop": [5]},
    {"stop": {}},
    {"stop": list("abcde")},
    {"stop": "x" * 5000},
    {"stop_token_ids": ["a"]},
    {"stop_token_ids": 5},
    {"stop_token_ids": list(range(100))},
    {"max_tokens": -1},
    {"max_tokens": "5"},
    {"max_tokens": 1.5},
    {"max_token": 5},
    {"min_tokens": 5},
    {"ignore_eos": True},
    {"bad_words": ["x"]},
    {"allowed_token_ids": [1]},
    {"logit_bias": {"5": 1}},
    {"presence_penalty": 0.5},
    {"frequency_penalty": 0.5},
    {"repetition_penalty": 1.5},
    {"use_beam_search": True},
    {"best_of": 2},
    {"truncate_prompt_tokens": 5},
    {"model": 5},
    {"logits_processors": ["x"]},
    {f"x{number}": 1 for number in range(100)},
]
WRONG_CHATS: Sequence[dict[str, Any]] = [
    *WRONG_SAMPLING,
    {"max_tokens": 0},
    {"max_completion_tokens": 0},
    {"max_completion_tokens": "5"},
    {"messages": []},
    {"messages": None},
    {"messages": "hi"},
    {"messages": [USER] * 3000},
    messages(5),
    messages({}),
    messages({"role": "narrator", "content": "x"}),
    messages({"role": "user", "content": 5}),
    messages({**USER, "mood": "glad"}),
    parts(5),
    parts({"type": "text"}),
    parts({"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}),
    calls(function={"name": "f", "arguments": "{"}),
    calls(function={"name": "f", "arguments": "[]"}),
    calls(function={"name": "f", "arguments": {}}),
    calls(function={"name": "f"}),
    calls(id=5),
    calls(type="custom"),
    {"tools": 5},
    {"tools": [5]},
    {"tools": [{"type": "function"}]},
    {"tools": [FUNCTION] * 129},
    {"parallel_tool_calls": False},
    {"logprobs": 5},
    {"top_logprobs": 3},
    {"top_logprobs": 99},
    {"stream": "yes"},
    {"stream_options": 5},
    {"skip_special_tokens": False},
    {"reasoning_effort": "high"},
    {"modalities": ["audio"]},
    {"functions": [{"name": "f"}]},
    {"chat_template": "x"},
    {"continue_final_message": True},
]
WRONG_COMPLETIONS: Sequence[dict[str, Any]] = [
    *WRONG_SAMPLING,
    {"prompt": None},
    {"prompt": ""},
    {"prompt": []},
    {"prompt": [[]]},
    {"prompt": ["hi", ""]},
    {"prompt": [1.5]},
    {"prompt": [-1]},
    {"prompt": [2**40]},
    {"prompt": [1, "hi"]},
    {"prompt": {}},
    {"prompt": [[1]] * 600},
    {"messages": [USER]},
    {"stream": "yes"},
    {"suffix": "x"},
    {"echo": "yes"},
    {"echo": True, "logprobs": 1},
    {"logprobs": True},
    {"logprobs": -1},
    {"logprobs": 99},
    {"return_token_ids": 1},
]
