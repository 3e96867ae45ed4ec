import hashlib

import pytest

from ratchet.data.jsonl import DataRow, fingerprint, read_jsonl
from ratchet.errors import DataError

QA = {"question": str, "answer": str}


def write(tmp_path, content: bytes):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    return path


def test_rows_carry_their_line_numbers_and_keep_unasked_columns(tmp_path):
    path = write(
        tmp_path,
        b'{"question": "1+1", "answer": "2", "level": 3}\n\n{"question": "2+2", "answer": "4"}',
    )
    assert list(read_jsonl(path, QA)) == [
        DataRow(1, {"question": "1+1", "answer": "2", "level": 3}),
        DataRow(3, {"question": "2+2", "answer": "4"}),
    ]


@pytest.mark.fault("D10")
def test_byte_order_mark_crlf_blank_lines_and_line_separators_inside_strings_are_accepted(tmp_path):
    path = write(tmp_path, '\ufeff{"a": "é"}\r\n \t \r\n{"a": "x\u2028y"}\r\n'.encode())
    assert [(row.line, row.values["a"]) for row in read_jsonl(path)] == [(1, "é"), (3, "x\u2028y")]


def test_it_streams(tmp_path):
    rows = read_jsonl(write(tmp_path, b'{"a": 1}\nnot json\n'))
    assert next(rows).values == {"a": 1}
    with pytest.raises(DataError, match="line 2"):
        next(rows)


def test_an_integer_is_a_number_but_true_is_not(tmp_path):
    (row,) = read_jsonl(write(tmp_path, b'{"x": 3}'), {"x": float})
    assert row.values == {"x": 3}
    with pytest.raises(DataError, match="column 'x' is true or false, must be a number"):
        list(read_jsonl(write(tmp_path, b'{"x": true}'), {"x": float}))


MALFORMED = [
    (b"", ": the file holds no rows"),
    (b"\n \n\r\n", ": the file holds no rows"),
    (
        b'{"question": "q", "answer": "a"',
        ", line 1 col 32: malformed JSON: Expecting ',' delimiter",
    ),
    (
        b'{"question": "q" "answer": "a"}',
        ", line 1 col 18: malformed JSON: Expecting ',' delimiter",
    ),
    (
        b"{'question': 1}",
        ", line 1 col 2: malformed JSON: Expecting property name enclosed in double quotes",
    ),
    (
        b'{"question": "q", "answer": "a"}\n{"question": "q\n',
        ", line 2 col 14: malformed JSON: Unterminated string starting at",
    ),
    (b'{"question": "a\tb"}', ", line 1 col 16: malformed JSON: Invalid control character at"),
    (b'{"question": "q", "answer": "a"} {}', ", line 1 col 34: malformed JSON: Extra data"),
    (b"\xef\xbb\xbfoops", ", line 1 col 1: malformed JSON: Expecting value"),
    (b'{"question": "q", "answer": NaN}', ", line 1: malformed JSON: NaN is not a JSON number"),
    (
        b'{"question": "q", "question": "r"}',
        ", line 1: malformed JSON: key 'question' appears twice in one object",
    ),
    (b"[" * 100_000, ", line 1: malformed JSON: nested more than 100 deep"),
    (b'["question", "answer"]', ', line 1: holds an array, must be an object such as {"key": ...}'),
    (b"null", ', line 1: holds null, must be an object such as {"key": ...}'),
    (b'"question"', ', line 1: holds a string, must be an object such as {"key": ...}'),
    (
        b'{"question": "q", "solution": "a"}',
        ", line 1: no column 'answer'; the row has question, solution",
    ),
    (b"{}", ", line 1: no column 'question'; the row has no columns"),
    (b'{"question": "q", "answer": null}', ", line 1: column 'answer' is null, must be a string"),
    (
        b'\n{"question": "q", "answer": 72}',
        ", line 2: column 'answer' is an integer, must be a string",
    ),
    (
        b'{"question": ["q"], "answer": "a"}',
        ", line 1: column 'question' is an array, must be a string",
    ),
    (
        b'{"question": "q", "answer": "a"}\n{"question": "caf\xe9"}\n',
        ", line 2: not UTF-8: byte 0xe9 at offset 17 of the line, 50 of the file: save it as UTF-8",
    ),
    (
        b"\xef\xbb\xbf\xff",
        ", line 1: not UTF-8: byte 0xff at offset 3 of the line, 3 of the file: save it as UTF-8",
    ),
    (
        b'{"question": "\\ud83d", "answer": "a"}',
        ", line 1: column 'question' holds half of a surrogate pair (\\ud800 to \\udfff), which is not text",
    ),
]


@pytest.mark.parametrize(("content", "message"), MALFORMED)
@pytest.mark.fault("D1", "D2", "D3", "D4", "D8")
def test_a_malformed_file_is_named_with_its_line(tmp_path, content, message):
    path = write(tmp_path, content)
    with pytest.raises(DataError) as caught:
        list(read_jsonl(path, QA))
    assert str(caught.value) == f"{path}{message}"


def test_an_integer_of_thousands_of_digits_is_an_error_that_names_the_line(tmp_path):
    with pytest.raises(DataError, match="line 1: malformed JSON: Exceeds the limit"):
        list(read_jsonl(write(tmp_path, b'{"x": ' + b"9" * 5000 + b"}")))


def test_unreadable_files_are_data_errors(tmp_path):
    with pytest.raises(DataError, match=r"absent.jsonl: can't be read: No such file or directory"):
        list(read_jsonl(tmp_path / "absent.jsonl"))
    with pytest.raises(DataError, match="can't be read: it is a directory"):
        list(read_jsonl(tmp_path))
    with pytest.raises(DataError, match=r"absent.jsonl: can't be read"):
        fingerprint(tmp_path / "absent.jsonl")


def test_the_fingerprint_is_of_size_and_content(tmp_path):
    path = write(tmp_path, b"abc")
    assert fingerprint(path) == hashlib.sha256(b"3\nabc").hexdigest()
    before = fingerprint(path)
    path.write_bytes(b"abd")
    assert fingerprint(path) != before
