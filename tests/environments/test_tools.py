"""Tools, and the calls that a policy makes of them."""

import asyncio
import contextlib
import json
import subprocess
import sys
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import ClassVar

import numpy as np
import psutil
import pytest
from pydantic import ValidationError

from ratchet.config.model_shape.presets import get_preset
from ratchet.config.resolve import build, resolve
from ratchet.data.chat.builtin_tokenizers import byte_tokenizer
from ratchet.data.formats.media import MediaLimits, decode_image, fetch
from ratchet.environments.tool_use.base import (
    ToolAnswer,
    Toolbox,
    ToolError,
    ToolUnavailable,
    build_tools,
)
from ratchet.environments.tool_use.calculator import calculate, format_value
from ratchet.environments.tool_use.python import describe_failure
from ratchet.environments.tool_use.retriever import Passage, RetrieverTool, load_embedder
from ratchet.errors import ConfigError, DataError
from ratchet.models.load import init_policy
from ratchet.rewards.deadline import CURRENT_DEADLINE
from ratchet.sandbox import Reason, Result, SandboxError
from ratchet.types import ToolCall
from ratchet.utils import user_code

SERVER = str(Path(__file__).with_name("mcp_server.py"))


def tool(kind, **keys):
    return build(resolve("tool", {"kind": kind, **keys}))


def answered(toolbox, name, **arguments):
    return asyncio.run(toolbox.run_call(ToolCall("call_0", name, arguments)))


# --- calculator


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1 + 2 * 3", 7),
        ("(1 + 2) * 3", 9),
        ("2 ** 3 ** 2", 512),
        ("-2 ** 2", -4),
        ("2 ** -1", Fraction(1, 2)),
        ("7 // 2 - -7 // 2", 7),
        ("-7 % 3", 2),
        ("0.1 + 0.2", Fraction(3, 10)),
        ("1e3 / 8", 125),
        ("007*08", 56),
        ("3 × 4 ÷ 6 − 1", 1),
        ("2^10", 1024),
        ("(-1) ** 999999", -1),
        ("0 ** 0", 1),
    ],
)
def test_values_are_exact_and_as_pythons(expression, value):
    assert calculate(expression) == value


@pytest.mark.parametrize(
    ("expression", "why"),
    [
        ("", "is empty"),
        ("1 +", "ends too early"),
        ("(1", r"'\)' is missing"),
        ("1)", "can't stand there"),
        ("1 2", "'2' can't stand there"),
        ("1 / (2 - 2)", "division by zero"),
        ("0 ** -1", "division by zero"),
        ("9 ** 9 ** 9", "too large"),
        ("10 ** 999 * 10 ** 999", "too large"),
        ("2 ** 0.5", "whole exponents"),
        ("(" * 200 + "1" + ")" * 200, "nested"),
        ("-" * 200 + "1", "nested"),
        ("1" * 2000, "2000 characters"),
        ("__import__('os')", "'_' is no number"),
    ],
)
def test_what_is_no_expression_is_told(expression, why):
    with pytest.raises(ToolError, match=why):
        calculate(expression)


def test_values_are_written_short():
    assert [format_value(Fraction(*v)) for v in ((6, 2), (-1, 4), (1, 3), (10**20, 1))] == [
        "3", "-0.25", "0.333333333333", "1" + "0" * 20,
    ]  # fmt: skip


# --- calls


class Odd:
    """Does what it is told to."""

    name, description = "odd", "Odd."
    parameters: ClassVar = {
        "type": "object",
        "properties": {"how": {"type": "string"}, "n": {"type": "integer"}},
        "required": ["how"],
    }

    async def call(self, how, n=0):
        if how == "raise":
            raise ZeroDivisionError("oops")
        if how == "hang":
            await asyncio.Event().wait()
        if how == "broken":
            raise SandboxError("the machine")
        return "x" * n


@pytest.mark.parametrize(
    ("name", "arguments", "told"),
    [
        ("eval", {}, "Error: there is no tool 'eval'; there are odd"),
        ("odd", {}, "Error: the argument 'how' is missing; the tool takes how, n"),
        ("odd", {"how": "x", "m": 1}, "Error: there is no argument 'm'; the tool takes how, n"),
        ("odd", {"how": 3}, "Error: the argument 'how' must be of type string, not 3"),
        (
            "odd",
            {"how": "x", "n": True},
            "Error: the argument 'n' must be of type integer, not True",
        ),
        ("odd", {"how": "raise"}, "Error: ZeroDivisionError: oops"),
        ("odd", {"how": "hang"}, "Error: odd gave no answer within 0.05 s"),
    ],
)
def test_what_goes_wrong_with_a_call_is_answered(name, arguments, told):
    answer = answered(Toolbox([Odd()], timeout_s=0.05), name, **arguments)
    assert (answer.content, answer.is_error) == (told, True)


def test_a_tool_that_catches_its_cancellation_is_left_behind(monkeypatch):
    monkeypatch.setattr(user_code, "STOP_S", 0.01)

    class Stubborn(Odd):
        name = "stubborn"

        async def call(self, how):
            for _ in range(2):  # the second cancellation comes with the end of the event loop
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.Event().wait()

    answer = answered(Toolbox([Stubborn()], timeout_s=0.01), "stubborn", how="x")
    assert answer.content == "Error: stubborn gave no answer within 0.01 s"


def test_what_is_wrong_with_the_machinery_is_nobodys_answer():
    with pytest.raises(SandboxError):
        answered(Toolbox([Odd()]), "odd", how="broken")


@pytest.mark.fault("R8")
def test_a_long_answer_is_cut_and_names_are_unique():
    assert (
        answered(Toolbox([Odd()], max_chars=3), "odd", how="say", n=5).content
        == "xxx\n[cut after 3 characters]"
    )
    assert answered(Toolbox([Odd()]), "odd", how="say", n=2).content == "xx"
    with pytest.raises(ConfigError, match="two tools are called 'odd'"):
        Toolbox([Odd(), Odd()])
    with pytest.raises(ConfigError, match="is not a tool"):
        build_tools([resolve("tool", {"kind": "fractions:Fraction", "numerator": 1})])


# --- python


@pytest.mark.medium
def test_programs_run_in_the_sandbox():
    toolbox = Toolbox([tool("python", timeout_s=1, workers=1)])
    assert answered(toolbox, "python", code="print(sum(range(10)))").content == "45\n"
    assert answered(toolbox, "python", code="x = 1").content == "(nothing was printed)"
    failed = answered(toolbox, "python", code="print(1)\nraise KeyError('k')")
    assert failed.is_error
    assert "exit code 1" in failed.content
    assert "KeyError: 'k'" in failed.content
    assert "printed before: 1" in failed.content
    assert (
        "the program failed: it took too long"
        in answered(toolbox, "python", code="while True: pass").content
    )
    ends = [
        describe_failure(Result(None, None, b"", b"", 1.0, reason))
        for reason in (Reason.WALL, Reason.CPU)
    ]
    assert ends[0] == ends[1], "a busy machine would change what the policy reads"


def test_the_wait_for_the_sandbox_is_no_error_of_a_program():
    python = tool("python", workers=1)
    run = python.sandbox.run

    async def queued(program, stdin, limits):
        assert CURRENT_DEADLINE.get()._timeout.when() is None, "the call's own clock runs on"
        assert limits.wall_s == 0.5
        return await run(program, stdin, replace(limits, wall_s=60))

    python.sandbox.run = queued
    answer = asyncio.run(
        Toolbox([python], timeout_s=0.5).run_call(ToolCall("1", "python", {"code": "print(6 * 7)"}))
    )
    assert answer == ToolAnswer("42\n")
    python.sandbox.close()


# --- search

PASSAGES = [
    Passage("The capital of France is Paris.", "France"),
    Passage("Berlin lies on the Spree.", "Germany"),
    Passage("Bread is baked from flour."),
]


def test_passages_are_found_by_their_words():
    search = RetrieverTool(PASSAGES, results=2, max_chars=11)
    assert search.search("what is the capital of France?") == [PASSAGES[0]]
    assert search.call("Spree Germany") == "[1] Germany\nBerlin lies"
    assert search.call("zebra") == "nothing was found"
    assert search.call("") == "nothing was found"
    for wordless in ([], [Passage("", "?!")]):
        with pytest.raises(DataError, match="without words"):
            RetrieverTool(wordless)


def by_first_letter(texts):
    return (
        np.array([[text.strip()[:1] == letter for letter in "FGB"] for text in texts], dtype=float)
        + 1e-3
    )


def test_and_by_meaning_where_embeddings_are_given(tmp_path):
    """By hand: words rank none for "Bx"; the first letter ranks the third passage first."""
    search = RetrieverTool(PASSAGES, results=1, embed=by_first_letter)
    assert search.search("Bx") == [PASSAGES[2]]
    # First by words and second by meaning beats first by meaning alone.
    assert (
        RetrieverTool(PASSAGES, results=3, embed=by_first_letter).search("Flour")[0] == PASSAGES[2]
    )
    with pytest.raises(DataError, match=r"shape \[3, d\]"):
        RetrieverTool(PASSAGES, embed=lambda texts: np.zeros(3))
    tokenizer = byte_tokenizer()
    model = init_policy(
        get_preset("tiny", vocab_size=tokenizer.vocab_size, hidden_size=32, n_layers=1), seed=1
    )
    model.save(tmp_path)
    tokenizer.save(tmp_path)
    vectors = load_embedder(str(tmp_path))(["one", "two", ""])
    assert vectors.shape == (3, 32)
    assert RetrieverTool(PASSAGES, results=1, embed=load_embedder(str(tmp_path))).search(
        PASSAGES[1].text
    ) == [PASSAGES[1]]


def test_k1_and_b_weigh_repetitions_and_lengths():
    """By hand: the first passage repeats the word but is long; the second is short."""
    passages = [Passage("cat cat cat " + "pet " * 9), Passage("cat"), Passage("a dog")]

    def find(**keys):
        return passages.index(RetrieverTool(passages, results=1, **keys).search("cat")[0])

    # tf / (tf + k1 * (1 - b + b * length / mean length)), Robertson & Zaragoza 2009, eq. 3.15
    assert find(b=0.0) == 0  # 3 / 4.5 against 1 / 2.5
    assert find(b=1.0) == 1  # 3 / (3 + 1.5 * 12 * 3 / 14) against 1 / (1 + 1.5 * 3 / 14)
    assert find(k1=0.0, b=0.0) == 0  # 1 and 1: the first of two that are equal
    assert find(k1=0.01, b=1.0) == 1  # 3 / 3.026 against 1 / 1.002


def test_a_corpus_is_a_file_a_directory_or_a_dataset(tmp_path):
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"text": "a cat", "title": "Pets"}\n{"text": "a dog"}\n')
    assert tool("search", corpus=str(corpus)).call("dog") == "[1] a dog"
    (tmp_path / "more.csv").write_text("text\na frog\n")
    joined = tool("search", corpus=str(tmp_path))
    assert (joined.call("frog"), joined.call("cat")) == ("[1] a frog", "[1] Pets\na cat")
    with pytest.raises(DataError, match=r"corpus.jsonl, line 1.*'body'"):
        tool("search", corpus=str(corpus), text_column="body")
    for keys in ({}, {"corpus": str(corpus), "hub": "wiki"}):
        with pytest.raises(ValidationError, match="either corpus or hub"):
            tool("search", **keys)
    for keys in ({"split": "test"}, {"subset": "en"}):
        with pytest.raises(ValidationError, match="belong to hub"):
            tool("search", corpus=str(corpus), **keys)


@pytest.mark.medium
@pytest.mark.needs("datasets")
def test_a_corpus_is_a_split_of_a_dataset(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    for split, animal in (("train", "cat"), ("test", "dog")):
        (tmp_path / f"{split}.jsonl").write_text(f'{{"body": "a {animal}"}}\n')
    search = tool("search", hub=str(tmp_path), split="test", text_column="body")
    assert (search.call("dog"), search.call("cat")) == ("[1] a dog", "nothing was found")
    with pytest.raises(DataError, match="can't be loaded"):
        tool("search", hub=str(tmp_path), subset="absent")


# --- MCP


def mcp(**keys):
    return tool("mcp", command=[sys.executable, SERVER], **keys)


@pytest.mark.slow
def test_tools_of_an_mcp_server_are_called_by_its_own_client():
    toolbox = Toolbox(mcp())
    add, *_ = toolbox.schemas
    assert (add["function"]["name"], add["function"]["description"]) == (
        "add",
        "Adds two whole numbers.",
    )
    assert set(add["function"]["parameters"]["properties"]) == {"a", "b"}
    json.dumps(toolbox.schemas)
    assert answered(toolbox, "add", a=2, b=3).content == "5"
    assert (
        answered(toolbox, "add", a=2, b="x").content
        == "Error: the argument 'b' must be of type integer, not 'x'"
    )
    failed = answered(toolbox, "fail")
    assert failed.is_error
    assert "no luck" in failed.content
    assert answered(toolbox, "draw").content == "a dot:\n(image)"
    text, dot = answered(Toolbox(mcp(images=True)), "draw").content
    assert (text.value, dot.type) == ("a dot:", "image")
    source = fetch(dot.value, where="", limits=MediaLimits())
    assert decode_image(source, where="", limits=MediaLimits()).size == (1, 1)


@pytest.mark.slow
def test_an_mcp_server_that_dies_fails_the_attempt_and_is_started_again():
    toolbox = Toolbox(mcp())
    with pytest.raises(ToolUnavailable):
        answered(toolbox, "die")
    assert answered(toolbox, "add", a=1, b=1).content == "2"


@pytest.mark.slow
def test_an_mcp_server_offers_what_it_is_asked_for():
    assert [found.name for found in mcp(only=["fail"])] == ["fail"]
    with pytest.raises(ConfigError, match="has no tool 'sub': it has add, draw, fail, die"):
        mcp(only=["sub"])
    with pytest.raises(ToolUnavailable, match="can't be used"):
        tool("mcp", command=["/nonexistent/server"])


ODD_SERVER = str(Path(__file__).with_name("odd_mcp_server.py"))


def odd_mcp(fault, **keys):
    return tool("mcp", command=[sys.executable, ODD_SERVER, fault], **keys)


@pytest.mark.slow
def test_an_mcp_servers_tools_are_listed_to_the_last_page_and_its_errors_are_answers():
    tools = odd_mcp("pages")
    assert [found.name for found in tools] == ["a", "b"]
    # "closed" is the server's word here: the connection is open.
    assert answered(Toolbox(tools), "b") == ToolAnswer("Error: the file is closed", is_error=True)
    with pytest.raises(ToolUnavailable, match="it lists two tools called 'a'"):
        odd_mcp("twins")


@pytest.mark.slow
def test_what_breaks_mcps_protocol_is_no_answer(tmp_path):
    toolbox = Toolbox(odd_mcp("shapes"))
    assert answered(toolbox, "a").content == '{"sum": 3}'
    with pytest.raises(ToolUnavailable, match="answered with no result of a tool"):
        answered(toolbox, "b")
    toolbox = Toolbox(odd_mcp(str(tmp_path / "started")))
    with pytest.raises(ToolUnavailable, match="has ended"):
        answered(toolbox, "a")
    for _ in range(2):
        with pytest.raises(ToolUnavailable, match="has other tools since its restart"):
            answered(toolbox, "a")


@pytest.mark.slow
def test_an_mcp_server_that_never_answers_is_killed():
    before = set(psutil.Process().children())
    with pytest.raises(ToolUnavailable, match=r"did not list its tools within 0\.2 s"):
        odd_mcp("silence", start_s=0.2)
    started = set(psutil.Process().children()) - before
    _, alive = psutil.wait_procs(started, timeout=20)
    assert not alive


@pytest.mark.slow
def test_an_mcp_server_that_does_not_end_is_killed_with_the_process():
    program = (
        "import sys, psutil\n"
        "from ratchet.environments.tool_use.mcp import MCPConfig, MCPServer\n"
        "server = MCPServer(MCPConfig(command=sys.argv[1:]))\n"
        "print(psutil.Process().children()[0].pid)\n"
    )
    command = [sys.executable, "-c", program, sys.executable, ODD_SERVER, "pages"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert not psutil.pid_exists(int(ended.stdout))
