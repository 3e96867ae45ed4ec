"""How much JSON one request may hold, counted before it is parsed: parsing holds up all other
requests."""

from __future__ import annotations

import json

import pytest
from pydantic import ValidationError

from ratchet.experience.openai_proxy.schema import ChatRequest
from ratchet.experience.openai_proxy.wire import ApiError, JsonValueBudget

USER = {"role": "user", "content": "hi"}


def called(arguments: str) -> dict[str, object]:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def body(*messages: dict[str, object], **keys: object) -> bytes:
    return json.dumps({"model": "policy", "messages": [USER, *messages], **keys}).encode()


@pytest.mark.fault("S19")
@pytest.mark.parametrize(
    ("text", "values"),
    [
        (b"{}", 1),
        (b'{"a": "[,{", "b": [1, 2]}', 4),
        (rb'{"a": "\"[,", "b": 1}', 2),
        (rb'["\\", 1, "\\\""]', 3),
    ],
)
def test_values_outside_of_strings_are_counted(text: bytes, values: int) -> None:
    budget = JsonValueBudget()
    budget.take(text)
    assert budget.max_values - budget.remaining == values


@pytest.mark.parametrize("piece", ["[]", "{}", "1", '"a"', '{"a":"b"}'])
def test_a_body_of_too_many_values_is_refused(piece: str) -> None:
    many = body(tools=[]).replace(b"[]", f"[{','.join([piece] * 2**17)}]".encode())
    with pytest.raises(ApiError, match="more than 65536 values of JSON") as refused:
        ChatRequest.read(many)
    assert refused.value.status == 400


def test_a_body_of_many_strings_is_refused_unsplit() -> None:
    with pytest.raises(ValueError, match="more than 4 values"):
        JsonValueBudget(4).take(b'""' * 9)


def test_arguments_of_all_calls_share_the_budget() -> None:
    half = json.dumps({"a": [0] * 2**15})
    assert ChatRequest.read(body(called(half)))
    with pytest.raises(ApiError, match="more than 65536 values of JSON"):
        ChatRequest.read(body(called(half), called(half)))


def test_long_texts_of_marks_are_no_values() -> None:
    code = '{"a": [1, 2, \\"x\\"]},' * 2**14
    request = ChatRequest.read(
        body({"role": "user", "content": code}, called(json.dumps({"code": code})))
    )
    assert request.conversation[1].text == code


MISTAKES = {
    "messages": {"messages": [{"role": "x"}] * 2000},
    "keys of messages": {"messages": [{**USER, "a": 1}] * 2000},
    "calls": {"messages": [{"role": "assistant", "tool_calls": [{}] * 2000}]},
    "tools": {"tools": [{}] * 100},
    "metadata": {"metadata": {str(i): 1 for i in range(2000)}},
}


@pytest.mark.fault("S19")
@pytest.mark.parametrize("wrong", MISTAKES.values(), ids=MISTAKES)
def test_many_mistakes_cost_no_more_than_one(wrong: dict[str, object]) -> None:
    """An error for each took three seconds for a MiB, in which no other request was answered."""
    with pytest.raises(ValidationError) as refused:
        ChatRequest.model_validate(
            {"model": "policy", "messages": [USER], **wrong}, context=JsonValueBudget()
        )
    assert refused.value.error_count() <= 10


def test_a_refusal_does_not_repeat_a_long_key() -> None:
    with pytest.raises(ApiError) as refused:
        ChatRequest.read(
            body(**{"temperatur" + "e" * 10_000: 1, "stream_options": {"k" * 9999: 1}})
        )
    assert len(str(refused.value)) < 300
    assert len(refused.value.param or "") <= 200
