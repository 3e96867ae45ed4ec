"""Files and JSON read within bounds: what is refused, and that what is ordinary is read as
before."""

import json
import os
import socket

import hostile
import pytest

from ratchet.cli.errors import explain_error
from ratchet.errors import DataError, WeightSyncError
from ratchet.utils import safe_read
from ratchet.utils.terminal_text import escape_controls, get_first_line, make_console, shorten_text


@pytest.mark.fault("D16")
@pytest.mark.parametrize(
    ("content", "expected"),
    [(hostile.PIPE, "a pipe"), (hostile.ZERO, "a device"), (hostile.FOLDER, "a directory")],
)
def test_only_plain_files_are_opened(content, expected, tmp_path):
    path = hostile.place(tmp_path / "x", content)
    with pytest.raises(OSError, match=f"it is {expected}, and must be a plain file"):
        safe_read.open_file(path)
    with pytest.raises(OSError, match=expected):
        safe_read.read_json(path)


def test_a_socket_and_a_name_that_is_none_are_refused(tmp_path):
    with socket.socket(socket.AF_UNIX) as server:
        os.chdir(tmp_path)  # a socket's path is short
        server.bind("s")
        with pytest.raises(OSError, match="a socket"):
            safe_read.open_file("s")
    with pytest.raises(OSError, match="can't name a file"):
        safe_read.open_file("a\0b")


def test_a_link_to_a_plain_file_is_followed(tmp_path):
    (tmp_path / "x").write_text("abc")
    (tmp_path / "y").symlink_to(tmp_path / "x")
    assert safe_read.read_text(tmp_path / "y") == "abc"


def test_sizes_and_texts_are_bounded(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"\xef\xbb\xbfa\r\nb\xff")
    with pytest.raises(OSError, match="it holds more than 4 bytes"):
        safe_read.read_bytes(path, 4)
    with pytest.raises(ValueError, match="is not UTF-8 text: byte 0xff at offset 7, in line 2"):
        safe_read.read_text(path)
    path.write_bytes(b"\xef\xbb\xbfa\r\nb")
    assert safe_read.read_text(path) == "a\nb"


@pytest.mark.parametrize("depth", [1, 50, safe_read.MAX_DEPTH])
def test_json_within_the_depth_is_what_the_standard_library_reads(depth):
    text = '{"a": ' * depth + "[1.5, null]" + "}" * depth
    if depth < safe_read.MAX_DEPTH:
        assert safe_read.parse_json(text) == json.loads(text)
    else:
        with pytest.raises(ValueError, match="nested more than 100 deep"):
            safe_read.parse_json(text)


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, "[" * 100_000 + "]" * 100_000, '{"a":' * 900 + "1" + "}" * 900, "9" * 5000],
)
def test_json_that_breaks_a_parser_is_a_value_error(text):
    with pytest.raises(ValueError, match=r"."):
        safe_read.parse_json(text)
    with pytest.raises(ValueError, match=r"."):
        safe_read.parse_json(text.encode())


@pytest.mark.parametrize("item", ["[]", '{"a":1}', '["[]", []]'])
def test_json_that_is_hardly_anything_but_containers(item, monkeypatch):
    monkeypatch.setattr(safe_read, "MAX_CONTAINERS", 1000)
    assert len(safe_read.parse_json(f"[{','.join([item] * 400)}]")) == 400
    with pytest.raises(
        ValueError, match=r"it holds more than [\d,]+ objects and arrays in [\d,]+ characters"
    ):
        safe_read.parse_json(f"[{','.join([item] * 8000)}]")


def test_brackets_in_strings_are_no_containers(monkeypatch):
    monkeypatch.setattr(safe_read, "MAX_CONTAINERS", 10)
    text = json.dumps(["[[{\\" * 1000, '"[{' * 1000])
    assert safe_read.parse_json(text) == json.loads(text)
    # Of a string that never ends, each quotation mark could be a beginning.
    with pytest.raises(json.JSONDecodeError, match="Unterminated string"):
        safe_read.parse_json('["' + '\\"[' * 300_000)


# --- terminals


@pytest.mark.fault("S18")
def test_what_steers_a_terminal_is_shown_as_its_code():
    steering = "\x1b]0;x\x07 \x9b1m \u202eabc\u2066 \u200b \u2028 \ud800 \r"
    assert (
        escape_controls(steering)
        == r"\x1b]0;x\x07 \x9b1m \u202eabc\u2066 \u200b \u2028 \ud800 \x0d"
    )
    ordinary = "naïve\tline\n\u05e9\u05dc\u05d5\u05dd नमस्ते 👩\u200d💻 日本"
    assert escape_controls(ordinary) == ordinary


@pytest.mark.fault("S18")
def test_a_console_escapes_in_tables_and_markup(capsys):
    from rich.table import Table

    table = Table("name")
    table.add_row("a\u202eb\x1b[2J")
    make_console().print(table)
    make_console().print("[bold]x[/] \u2067", "y\x1b[2J")
    written = capsys.readouterr().out
    assert r"a\u202eb\x1b[2J" in written
    assert r"x \u2067 y\x1b[2J" in written
    assert "\x1b" not in written


def test_long_texts_are_cut():
    assert shorten_text("abcdefghij", 10) == "abcdefghij"
    assert shorten_text("abcdefghijk", 10) == "abcdef ..."
    assert get_first_line("\n\n  a\nb") == "a"
    assert get_first_line("") == "no reason is given"


# --- how a command ends


def test_each_kind_of_error_has_its_status():
    assert explain_error(DataError("x")) == ("DataError: x", 2)
    assert explain_error(WeightSyncError("x")) == ("WeightSyncError: x", 1)
    assert len(explain_error(DataError("x" * 100_000))[0]) < 12_000
    assert explain_error(ValueError("a bug")) is None
    for error in (
        MemoryError(),
        ImportError("libx.so: failed to map segment"),
        RuntimeError("can't allocate memory"),
    ):
        text, status = explain_error(error)
        assert status == 2
        assert text.startswith("there is not enough memory")
    text, status = explain_error(RecursionError())
    assert (status, "nested too deeply" in text) == (2, True)


def test_the_last_lines_of_a_file_are_whole(tmp_path):
    path = tmp_path / "log"
    path.write_text("".join(f"line {i}\n" for i in range(100)))
    assert safe_read.read_last_lines(path, 2, max_bytes=1000) == ["line 98", "line 99"]
    assert safe_read.read_last_lines(path, 9, max_bytes=20) == ["line 98", "line 99"]
    path.write_text("x" * 50)
    assert safe_read.read_last_lines(path, 9, max_bytes=20) == ["x" * 20]
    assert safe_read.read_last_lines(tmp_path / "none", 9, max_bytes=20) == []
