"""`ratchet data inspect`: rows after the template, which tokens train, how long they are; and what
is said of bad data."""

from __future__ import annotations

import io
import json
import sys

import pytest
from rich.console import Console

from ratchet.cli.main import main
from ratchet.commands.inspect_data import TokenSequence, _colour_tokens, inspect
from ratchet.data import jsonl
from ratchet.data.chat.builtin_tokenizers import byte_tokenizer
from ratchet.data.chat.renderer import Renderer
from ratchet.errors import ConfigError
from ratchet.types import Message, Task

ASKED = {"stage": None, "tokenizer": None, "template": None}


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


@pytest.fixture
def look(capsys):
    """`look("rows.jsonl", "preset=gsm8k", rows=1)`: what comes out, as values."""

    def run(target, *words, rows=1, sample=8, split="train", **asked):
        inspect(
            target, words, rows=rows, sample=sample, split=split, as_json=True, **{**ASKED, **asked}
        )
        return json.loads(capsys.readouterr().out)

    return run


def test_a_conversation_is_shown_as_it_will_be_trained_on(look, tmp_path):
    messages = [("user", "1+1?"), ("assistant", "2"), ("user", "2+2?"), ("assistant", "4")]
    rows = [{"messages": [{"role": role, "content": text} for role, text in messages]}]
    found = look(write(tmp_path / "a.jsonl", rows), "test_share=0.0")
    (row,) = found["rows"]
    renderer = Renderer(byte_tokenizer(), "turns")
    tokens, trainable = renderer.supervised(
        [Message(role, text) for role, text in messages], train="all"
    )
    assert row["ids"] == tokens
    assert row["text"] == renderer.tokenizer.decode(tokens, skip_special=False)
    assert [i for start, end in row["spans"] for i in range(start, end)] == [
        i for i, one in enumerate(trainable) if one
    ]
    said = [
        renderer.tokenizer.decode(tokens[start:end], skip_special=False)
        for start, end in row["spans"]
    ]
    assert said == ["2<eos>", "4<eos>"]
    assert found["lengths"]["row"]["count"] == 1
    assert found["lengths"]["row"]["most"] == len(tokens)


def test_what_a_row_holds_decides_what_is_shown_of_a_file(look, tmp_path):
    rows = [
        {"prompt": "P", "chosen": "good", "rejected": "bad"},
        {"prompt": "Q", "completion": "C", "label": 1},
        {"prompt": "R", "completions": ["one"], "labels": [1]},
        {"prompt": "S", "answer": "7"},
        {"prompt": "T"},
    ]
    found = look(
        write(tmp_path / "a.jsonl", rows), "test_share=0.0", "shuffle=false", rows=5, sample=5
    )
    assert [row["part"] for row in found["rows"]] == [
        "chosen",
        "rejected",
        "answer",
        "answer",
        "row",
        "prompt",
    ]
    assert found["rows"][-1]["trainable"] == 0
    assert found["lengths"]["answer"]["count"] == 2


def test_a_recipe_says_how_its_rows_become_tokens(look, tmp_path):
    path = write(
        tmp_path / "pairs.jsonl",
        [{"prompt": f"{i}?", "chosen": "4", "rejected": "55"} for i in range(40)],
    )
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        "model: {preset: tiny}\ntokenizer: {kind: characters, template: turns}\n"
        f"environment: {{kind: preferences, train: {path}}}\n"
        "stages:\n- {name: first, algorithm: {kind: sft}}\n- {name: second, algorithm: {kind: "
        "dpo}}\n"
    )
    (row,) = look(str(recipe))["rows"]
    assert (row["part"], row["text"].endswith("<assistant>4<eos>")) == ("row", True)
    found = look(str(recipe), "tokenizer.template=plain", stage="second", split="test")
    assert [row["text"][-4:] for row in found["rows"]] == ["?4<eos>"[-4:], "<eos>"[-4:]]
    assert found["lengths"]["rejected"]["most"] == found["lengths"]["chosen"]["most"] + 1
    with pytest.raises(ConfigError, match="no stage 'third': there are first, second"):
        look(str(recipe), stage="third")


def test_what_trains_is_coloured_and_commands_to_the_terminal_are_not_passed_on():
    renderer = Renderer(byte_tokenizer(), "turns")
    tokens, trainable = renderer.supervised(
        [Message("user", "a\x1b]0;x\x07"), Message("assistant", "b\tc")], train="all"
    )
    shown = TokenSequence(Task("t", ()), "row", tokens, trainable)
    console = Console(file=io.StringIO(), force_terminal=True, color_system="standard", width=200)
    console.print(_colour_tokens(shown, renderer, add_brackets=False))
    said = console.file.getvalue()
    assert "\x1b[1;32mb" in said
    assert "\\x1b]0;x\\x07" in said
    assert "⟦" not in said
    assert "⟦b\tc<eos>⟧" in _colour_tokens(shown, renderer, add_brackets=True).plain


def run_command(monkeypatch, capsys, *words):
    monkeypatch.setattr(sys, "argv", ["ratchet", *words])
    with pytest.raises(SystemExit) as left:
        main()
    return left.value.code, capsys.readouterr()


def test_the_command(monkeypatch, capsys, tmp_path):
    path = write(
        tmp_path / "a.jsonl", [{"question": f"{i}?", "answer": f"so\n#### {i}"} for i in range(30)]
    )
    code, said = run_command(
        monkeypatch, capsys, "data", "inspect", path, "preset=gsm8k", "--rows", "2"
    )
    assert code == 0
    assert said.out.count("⟦so") == 2
    assert "tokens a row" in said.out


TWELVE = b'{"prompt": "Q%d", "answer": "a"}\n'
BAD = [
    ("a.jsonl", b"".join(TWELVE % i for i in range(11)) + b'{"prompt": \n', ", line 12 col 1"),
    (
        "a.jsonl",
        b"".join(TWELVE % i for i in range(11)) + b'{"answer": "a"}\n',
        ", line 12: no column 'prompt'; the row",
    ),
    ("a.jsonl", b"", ": the file holds no rows"),
    (
        "a.jsonl",
        b'{"prompt": "caf\xe9", "answer": "a"}\n',
        ", line 1: not UTF-8: byte 0xe9 at offset 15 of the line",
    ),
    ("a.jsonl", b'{"prompt": "' + b"x" * (2 << 20) + b'"}', ", line 1: longer than 1 MiB"),
    ("a.parquet", b"PAR1 and no more", ": not a valid Parquet file"),
    ("a.csv", b"prompt,answer\nQ\n", ", line 2: 1 values, and the header names 2 columns"),
    ("a.json", b'{"prompt": "Q"', ", line 1 col 15: malformed JSON"),
    ("absent.jsonl", None, ": can't be read: No such file or directory"),
]


@pytest.mark.parametrize(("name", "content", "message"), BAD)
@pytest.mark.fault("D1", "D2", "D3", "D4")
def test_bad_data_end_a_command_with_a_sentence_and_status_2(
    name, content, message, monkeypatch, capsys, tmp_path
):
    monkeypatch.setattr(jsonl, "MAX_ROW_BYTES", 1 << 20)
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    code, said = run_command(monkeypatch, capsys, "data", "inspect", str(path))
    assert code == 2
    assert said.err.startswith(f"DataError: {path}{message}")
    assert "Traceback" not in said.err


@pytest.mark.medium
def test_a_row_beyond_the_context_is_named_with_the_way_out(monkeypatch, capsys, tmp_path):
    path = write(tmp_path / "a.jsonl", [{"prompt": "x" * 99, "answer": "a"}])
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        "threads: 1\nmodel: {preset: tiny, overrides: {hidden_size: 32, n_layers: 1, "
        "max_positions: 64}}\n"
        f"tokenizer: {{kind: bytes}}\nenvironment: {{kind: dataset, train: {path}, test_share: "
        f"0.0}}\n"
        "algorithm: {kind: sft}\nsteps: 1\nbatch_size: 1\nsampling: {max_new_tokens: "
        "8}\nevaluation: {tasks: 0}\n"
    )
    words = ["train", str(recipe), "--run-dir", str(tmp_path / "run"), "logging.progress=off"]
    code, said = run_command(monkeypatch, capsys, *words)
    assert code == 2
    assert (
        f"RowTooLong: {path}, line 1: 101 tokens, but the model holds 64: shorten or drop it"
        in said.err
    )
