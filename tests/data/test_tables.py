"""Rows by number from files of every form, here and in an object store; what is wrong with a file
is said by name."""

import errno
import gzip
import json
import os
import struct
from itertools import count

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ratchet.data import jsonl
from ratchet.data.files import find_files, open_binary
from ratchet.data.formats import arrow_tables
from ratchet.data.shuffle import WINDOW, RowOrder
from ratchet.data.tables import iter_rows, open_table, read_rows
from ratchet.errors import DataError, MissingDependency

ROWS = [{"question": f"{i}?", "answer": str(i)} for i in range(10)]
numbers = count()


def as_jsonl(rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def as_csv(rows):
    return (
        "question,answer\r\n" + "".join(f'"{row["question"]}",{row["answer"]}\r\n' for row in rows)
    ).encode()


def as_parquet(rows, group=3):
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(rows), sink, row_group_size=group)
    return sink.getvalue().to_pybytes()


def as_arrow(rows, stream=False):
    sink, table = pa.BufferOutputStream(), pa.Table.from_pylist(rows)
    with (pa.ipc.new_stream if stream else pa.ipc.new_file)(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=4)
    return sink.getvalue().to_pybytes()


def as_parquet_of(table):
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    return sink.getvalue().to_pybytes()


def as_arrow_of(table):
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


TWO_COLUMNS = pa.table({"x": ["1"], "y": ["2"]}).rename_columns(["x", "x"])
TWO_FIELDS = pa.table({"x": pa.StructArray.from_arrays([pa.array([1])] * 2, names=["a", "a"])})
ARROW_WITH_OFFSETS_BEYOND_ITS_END = as_arrow([{"x": "abcd"}, {"x": "efgh"}]).replace(
    struct.pack("<3i", 0, 4, 8), struct.pack("<3i", 0, 4, 64)
)
FORMS = {
    "rows.jsonl": as_jsonl(ROWS),
    "lines.json": as_jsonl(ROWS),
    "rows.json": json.dumps(ROWS, indent=1).encode(),
    "rows.csv": as_csv(ROWS),
    "rows.parquet": as_parquet(ROWS),
    "rows.arrow": as_arrow(ROWS),
    "stream.arrow": as_arrow(ROWS, stream=True),
    "rows.jsonl.gz": gzip.compress(as_jsonl(ROWS)),
}


@pytest.fixture(params=["local", "memory"])
def place(request, tmp_path):
    """Writes a file to this machine or to fsspec's memory, and says where it is."""

    def write(name, content):
        if request.param == "local":
            (tmp_path / name).write_bytes(content)
            return tmp_path / name
        address = f"memory://tables-{next(numbers)}/{name}"
        with fsspec.open(address, "wb") as file:
            file.write(content)
        return address

    return write


@pytest.mark.parametrize("name", FORMS)
def test_every_form_gives_the_same_rows_in_any_order(name, place):
    path = place(name, FORMS[name])
    table = open_table(path)
    assert len(table) == 10
    assert [row.values for row in iter_rows(table)] == ROWS
    assert [table.row(i).values for i in (7, 0, 9, 3)] == [ROWS[i] for i in (7, 0, 9, 3)]
    assert [row.values for row in read_rows(path, {"question": str})] == ROWS
    assert sum(table.block_sizes) == 10
    assert table.where(2).startswith(f"{path}, ")


def test_lines_are_counted_as_editors_do_and_other_rows_from_1(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'\n{"x": 1}\n \n{"x": 2}')
    (tmp_path / "b.csv").write_bytes(b'x,y\n"1\n2",a\n\n3,\n')
    (tmp_path / "c.parquet").write_bytes(FORMS["rows.parquet"])
    table = open_table(tmp_path / "a.jsonl", tmp_path / "b.csv", tmp_path / "c.parquet")
    assert [table.where(i).rpartition("/")[2] for i in (0, 1, 2, 3, 4, 13)] == [
        "a.jsonl, line 2", "a.jsonl, line 4", "b.csv, line 2", "b.csv, line 5", "c.parquet, row 1", "c.parquet, row 10",
    ]  # fmt: skip
    assert [table.row(i).values for i in (1, 2, 3)] == [
        {"x": 2},
        {"x": "1\n2", "y": "a"},
        {"x": "3", "y": None},
    ]
    assert table.block_sizes == [2, 2, 3, 3, 3, 1]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", b'"x";"y, z"\n1;"2;3"\n'),
        ("a.tsv", b'x\t"y, z"\n1\t2;3\n'),
        ("a.tsv", b"x\ty, z\n1\t2;3\n"),
        ("a.csv", b'x,"y, z"\n1,2;3\n'),
    ],
)
def test_columns_are_separated_by_what_the_header_holds(name, content, tmp_path):
    (tmp_path / name).write_bytes(content)
    table = open_table(*find_files([tmp_path]))
    assert table.row(0).values == {"x": "1", "y, z": "2;3"}


def test_patterns_and_directories_stand_for_their_files(tmp_path):
    for name in ("b.jsonl", "a.jsonl", "deep/c.parquet", "README.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(FORMS.get(f"rows.{name.partition('.')[2]}", b"words"))
    assert [path.name for path in find_files([tmp_path])] == ["a.jsonl", "b.jsonl", "c.parquet"]
    assert [path.name for path in find_files([str(tmp_path / "*.jsonl")])] == ["a.jsonl", "b.jsonl"]
    address = f"memory://expand-{next(numbers)}"
    for name in ("a.jsonl", "b.csv", "notes.txt"):
        with fsspec.open(f"{address}/{name}", "wb") as file:
            file.write(FORMS["rows.jsonl"])
    assert [path.rpartition("/")[2] for path in find_files([address])] == ["a.jsonl", "b.csv"]
    assert len(open_table(f"{address}/*.jsonl")) == 10
    with pytest.raises(DataError, match="no file matches this pattern"):
        find_files([tmp_path / "*.csv"])


def write_saved_dataset(path, rows=ROWS):
    """Write what `datasets.Dataset.save_to_disk` does, with a file of an earlier save beside it."""
    path.mkdir(parents=True)
    for name in ("data-00000-of-00001.arrow", "data-00001-of-00002.arrow"):
        with pa.ipc.new_stream(path / name, pa.Table.from_pylist(rows).schema) as file:
            file.write_table(pa.Table.from_pylist(rows))
    state = {"_data_files": [{"filename": "data-00000-of-00001.arrow"}], "_split": None}
    (path / "state.json").write_text(json.dumps(state, indent=2))
    (path / "dataset_info.json").write_text('{\n  "citation": ""\n}')


def test_a_saved_dataset_is_read_from_the_files_that_it_lists(tmp_path, monkeypatch):
    write_saved_dataset(tmp_path / "train")
    write_saved_dataset(tmp_path / "test")
    monkeypatch.chdir(tmp_path / "train")
    assert len(find_files(["."])) == 1
    (found,) = find_files([tmp_path / "train"])
    assert open_table(found).row(3).values == ROWS[3]
    address = f"memory://saved-{next(numbers)}"
    for path in (tmp_path / "train").iterdir():
        with fsspec.open(f"{address}/{path.name}", "wb") as file:
            file.write(path.read_bytes())
    assert len(find_files([address])) == 1
    # Both splits together would train on the rows held out.
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(
        DataError, match=r"several splits: name the directory of one: .*/test, .*n$"
    ):
        find_files([tmp_path])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=r"several splits: name the directory of one: test, train$"):
        find_files(["."])
    (tmp_path / "test" / "state.json").write_text("{}")
    with pytest.raises(DataError, match=r"test/state.json: lists no `_data_files`"):
        find_files([tmp_path / "test"])


@pytest.mark.parametrize("place", ["", "**/*.jsonl", "*/*.jsonl", "d*/*.jsonl", "dee[p]/a.jsonl"])
def test_a_folder_that_cannot_be_listed_is_named(place, tmp_path, monkeypatch):
    for name in ("a/a.jsonl", "deep/a.jsonl"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_bytes(FORMS["rows.jsonl"])
    scan = os.scandir

    def refuse(folder):
        if str(folder).endswith("/deep"):
            raise PermissionError(errno.EACCES, "Permission denied", str(folder))
        return scan(folder)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(DataError, match=r"/deep: can't be read: Permission denied"):
        find_files([tmp_path / place])
    assert len(find_files([tmp_path / "a*/*.jsonl"])) == 1  # the pattern does not lead there


def bomb(kind):
    """Return a table of 64 MiB that takes a kilobyte on disk."""
    texts = pa.DictionaryArray.from_arrays(pa.array([0] * 1024, pa.int32()), ["a" * (1 << 16)])
    if kind == "texts":
        return pa.table({"x": texts})
    if kind == "texts in lists":
        rows = pa.StructArray.from_arrays([texts], ["content"])
        return pa.table({"x": pa.ListArray.from_arrays([0, 1024], rows)})
    if kind == "bytes of a fixed number":
        return pa.table({"x": texts.cast(pa.string()).cast(pa.binary()).cast(pa.binary(1 << 16))})
    return pa.table(
        {"x": pa.ListArray.from_arrays([0, 1 << 23], pa.array(np.zeros(1 << 23, np.int8)))}
    )


def test_a_link_to_a_missing_shard_is_no_absent_shard(tmp_path):
    (tmp_path / "0.jsonl").write_bytes(as_jsonl(ROWS))
    (tmp_path / "1.jsonl").symlink_to(tmp_path / "moved.jsonl")
    for location in (tmp_path, tmp_path / "*.jsonl"):
        with pytest.raises(DataError, match=r"1\.jsonl: can't be read: No such file"):
            list(open_table(*find_files([location])))


@pytest.mark.medium
@pytest.mark.parametrize("kind", ["texts", "texts in lists", "bytes of a fixed number", "numbers"])
def test_a_row_group_that_would_fill_memory_is_refused(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(arrow_tables, "MAX_GROUP_BYTES", 1 << 25)
    pq.write_table(bomb(kind), tmp_path / "a.parquet", compression="zstd")
    table = open_table(tmp_path / "a.parquet")
    monkeypatch.setattr(table._file, "read_row_group", None)
    with pytest.raises(
        DataError, match=r"row group 0 unpacks to .* bytes: write the file with smaller"
    ):
        table.row(0)


def repeat_in_a_row(kind):
    """Return a list of 4,096 values that take almost no memory."""
    if kind == "nulls":
        return pa.ListArray.from_arrays([0, 4096], pa.nulls(4096))
    if kind == "nulls of a fixed number":
        return pa.FixedSizeListArray.from_arrays(pa.nulls(4096), 4096)
    if kind == "nulls in a map":
        keys = pa.array(range(2))
        return pa.MapArray.from_arrays([0, 2], keys, pa.array([None, [None] * 4096]))
    if kind == "numbers":
        return pa.ListArray.from_arrays([0, 4096], pa.array(np.zeros(4096, np.int8)))
    text = pa.array(["a" * 4096], pa.string_view())
    if kind == "texts":
        entries = pa.DictionaryArray.from_arrays(pa.array([0] * 64, pa.int8()), ["a" * 4096])
    else:  # views
        _, view, content = text.buffers()
        views = pa.py_buffer(view.to_pybytes()[:16] * 64)
        entries = pa.Array.from_buffers(pa.string_view(), 64, [None, views, content])
    return pa.ListArray.from_arrays([0, 64], entries)


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        ("numbers", "parquet"),
        *((kind, "arrow") for kind in ("nulls", "nulls of a fixed number", "nulls in a map")),
        *((kind, "arrow") for kind in ("texts", "views")),
    ],
)
@pytest.mark.fault("D16")
def test_a_row_that_would_fill_memory_is_refused(kind, form, tmp_path, monkeypatch):
    monkeypatch.setattr(arrow_tables, "MAX_ROW_VALUES", 1 << 10)
    monkeypatch.setattr(arrow_tables, "MAX_VALUES_PER_BYTE", 0.1)
    write = {"parquet": as_parquet_of, "arrow": as_arrow_of}[form]
    (tmp_path / f"a.{form}").write_bytes(write(pa.table({"x": repeat_in_a_row(kind)})))
    with pytest.raises(DataError, match=r"row 1: its lists unpack to 4,\d+ values, in a file of"):
        open_table(tmp_path / f"a.{form}").row(0)


def test_a_long_row_of_values_that_differ_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(arrow_tables, "MAX_ROW_VALUES", 1 << 10)
    rows = [{"x": [{"y": [i, i + 1]} for i in range(2000)], "z": {"a": 1}}]
    for name, write in (("a.parquet", as_parquet), ("a.arrow", as_arrow)):
        (tmp_path / name).write_bytes(write(rows))
        assert open_table(tmp_path / name).row(0).values == rows[0]


def test_views_of_lists_are_refused_because_they_may_overlap(tmp_path):
    starts, sizes = pa.array([0, 0], pa.int32()), pa.array([3, 3], pa.int32())
    views = pa.ListViewArray.from_arrays(starts, sizes, pa.array([1, 2, 3]))
    table = pa.table({"x": pa.StructArray.from_arrays([views], ["y"])})
    (tmp_path / "a.arrow").write_bytes(as_arrow_of(table))
    with pytest.raises(
        DataError, match=r"column 'x' has the type .*list_view.*: write it as lists"
    ):
        open_table(tmp_path / "a.arrow")


@pytest.mark.medium
def test_a_text_that_all_rows_share_is_no_bomb(tmp_path):
    shared = [{"system": "".join(map(str, range(5000))), "question": f"{i}"} for i in range(300)]
    pq.write_table(pa.Table.from_pylist(shared), tmp_path / "a.parquet")
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(as_jsonl(shared), 6))
    for name in ("a.parquet", "a.jsonl.gz"):
        assert open_table(tmp_path / name).row(7).values == shared[7]


def test_parquet_is_read_one_row_group_at_a_time_and_a_few_are_kept(tmp_path):
    (tmp_path / "rows.parquet").write_bytes(as_parquet(ROWS, group=1))
    table = open_table(tmp_path / "rows.parquet")
    read, whole = [], table._file.read_row_group
    table._file.read_row_group = lambda number: read.append(number) or whole(number)
    order = RowOrder(table.block_sizes, seed=3, name="x")
    for position in range(10):
        table.row(order.row_at(position))
    assert sorted(read) == list(range(10))  # each once: the order stays inside a window


BROKEN = [
    ("a.jsonl", b"", ": the file holds no rows"),
    ("a.csv", b"", ": the file holds no rows"),
    ("a.csv", b"x,y\n", ": the file holds no rows"),
    ("a.json", b"[]", ": the file holds no rows"),
    ("a.parquet", b"", ": not a valid Parquet file"),
    ("a.parquet", FORMS["rows.parquet"][:-9], ": not a valid Parquet file"),
    ("a.arrow", b"no arrow at all", ": not a valid Arrow file"),
    ("a.arrow", FORMS["rows.arrow"].replace(b"question", b"\xffuestion"), ": not a valid Arrow file"),
    ("a.arrow", ARROW_WITH_OFFSETS_BEYOND_ITS_END, ", row 1: can't be read: "),
    ("a.jsonl", as_jsonl(ROWS[:5] * 2) + b"\n{oops\n", ", line 12 col 2: malformed JSON: Expecting "
                                                       "property name"),
    ("a.json", b'[{"x": 1},\n {"x" 2}]', ", line 2 col 7: malformed JSON: Expecting ':' delimiter"),
    ("a.json", b'[{"x": 1}, 7]', ", row 2: holds an integer, must be an object"),
    ("a.json", b'[{"x": 1},\n{"x": "\xe9"}]', ", line 2: not UTF-8: byte 0xe9 at offset 7 of the "
                                              "line, 18 of the file"),
    ("a.json", b'\xef\xbb\xbf[\n{"x": "\xe9"}]', ", line 2: not UTF-8: byte 0xe9 at offset 7 of "
                                                 "the line, 12 of the file"),
    ("a.csv", b"x,x\n1,2\n", ", line 1: two columns are called 'x'"),
    ("a.parquet", as_parquet_of(TWO_COLUMNS), ": two columns are called 'x': rename one"),
    ("a.arrow", as_arrow_of(TWO_COLUMNS), ": two columns are called 'x': rename one"),
    ("a.parquet", as_parquet_of(TWO_FIELDS), ", row 1: can't be read: Converting to Python dictionary"),
    ("a.csv", b"x,y\n1,2\n1\n", ", line 3: 1 values, and the header names 2 columns"),
    ("a.csv", b"x;y\n1;2;3\n", ", line 2: 3 values, and the header names 2 columns: put values that "
                               "hold semicolons"),
    ("a.csv", b'x,y\n1,"2"3\n', ", line 2: malformed CSV: ',' expected after '\"'"),
    ("a.csv", b"x,y\n1,\xe9\n", ", line 2: not UTF-8: byte 0xe9 at offset 2 of the line, 6 of the "
                                "file"),
    ("a.jsonl.gz", b"no gzip", ": can't be read: Not a gzipped file"),
    ("a.jsonl.gz", gzip.compress(as_jsonl(ROWS), mtime=0)[:-12], ": can't be read: the gzip file "
                                                                 "ends too early"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "content", "message"), BROKEN)
@pytest.mark.fault("D1", "D2", "D3", "D4")
def test_a_broken_file_is_named_with_its_row(name, content, message, place):
    path = place(name, content)
    with pytest.raises(DataError) as caught:
        list(iter_rows(open_table(path)))
    assert str(caught.value).startswith(f"{path}{message}")


LAZILY_READ = [name for name in FORMS if name not in ("rows.json", "rows.jsonl.gz")]


@pytest.mark.parametrize("change", ["overwritten", "cut"])
@pytest.mark.parametrize("name", LAZILY_READ)
@pytest.mark.fault("D17")
def test_a_file_that_is_written_to_while_it_is_read_is_refused(name, change, tmp_path):
    path = tmp_path / name
    path.write_bytes(FORMS[name])
    os.utime(path, (0, 0))  # the clock of file systems is coarse
    table = open_table(path)
    assert table.row(1).values == ROWS[1]
    with path.open("r+b") as file:
        if change == "cut":
            file.truncate(len(FORMS[name]) // 3)
        else:
            file.write(FORMS[name].replace(b"8", b"9"))
    with pytest.raises(DataError) as caught:
        table.row(8)
    assert str(caught.value).startswith(f"{path}: it changed while it was read. Begin again, or ")


def test_a_file_that_is_replaced_while_it_is_read_stays_as_it_was(tmp_path):
    for name, content in FORMS.items():
        path = tmp_path / name
        path.write_bytes(content)
        table = open_table(path)
        path.unlink()
        path.write_bytes(b"another file")
        assert [row.values for row in iter_rows(table)] == ROWS


def test_a_csv_file_of_a_store_that_is_cut_is_refused(tmp_path):
    address = f"memory://cut-{next(numbers)}/a.csv"
    with fsspec.open(address, "wb") as file:
        file.write(FORMS["rows.csv"])
    table = open_table(address)
    fsspec.open(address).fs.store[address.removeprefix("memory:/")].truncate(40)
    with pytest.raises(DataError, match=r"a.csv: it changed while it was read"):
        table.row(9)


def test_a_line_without_end_is_not_read_into_memory(monkeypatch, tmp_path):
    monkeypatch.setattr(jsonl, "MAX_ROW_BYTES", 1 << 20)
    path = tmp_path / "long.jsonl"
    path.write_bytes(b'{"x": 1}\n{"x": "' + b"y" * (1 << 20) + b'"}\n')
    with pytest.raises(
        DataError,
        match=r"long.jsonl, line 2: longer than 1 MiB: write one row a line, or drop the row",
    ):
        open_table(path)


def test_what_is_absent_or_unknown_is_said(tmp_path, monkeypatch):
    with pytest.raises(DataError, match=r"absent.jsonl: can't be read: No such file or directory"):
        open_table(tmp_path / "absent.jsonl")
    with pytest.raises(
        DataError, match=r"memory://absent.jsonl: can't be read: No such file or directory"
    ):
        open_table("memory://absent.jsonl")
    with pytest.raises(DataError, match=r"nothing reads what://; there are .*memory"):
        open_table("what://a.jsonl")
    monkeypatch.setitem(__import__("sys").modules, "s3fs", None)
    with pytest.raises(
        MissingDependency,
        match=r"reading s3:// needs the package 's3fs': pip install 'ratchet-rl\[stores\]'",
    ):
        open_binary("s3://bucket/a.jsonl")


# --- the order


@pytest.mark.parametrize("blocks", [[10], [1], [3, 4, 0, 5], [2] * 20, [7, 1, 1, 30, 2, 9, 4]])
def test_each_pass_meets_every_row_once_in_an_order_of_its_own(blocks):
    order, rows = RowOrder(blocks, seed=1, name="x"), sum(blocks)
    passes = [
        [order.row_at(p) for p in range(start, start + rows)] for start in (0, rows, 2 * rows)
    ]
    assert all(sorted(one) == list(range(rows)) for one in passes)
    assert rows == 1 or passes[0] != passes[1]
    # of the position alone
    assert passes[1] == [
        RowOrder(blocks, seed=1, name="x").row_at(p) for p in range(rows, 2 * rows)
    ]
    assert [order.row_at(p) for p in (5 % rows, 2 * rows, 0)] == [
        passes[0][5 % rows],
        passes[2][0],
        passes[0][0],
    ]
    assert rows == 1 or passes[0] != [
        RowOrder(blocks, seed=2, name="x").row_at(p) for p in range(rows)
    ]


def test_an_order_is_the_same_for_ever():
    assert [RowOrder([10], seed=0, name="x").row_at(p) for p in range(10)] == [
        3,
        7,
        1,
        0,
        9,
        2,
        5,
        8,
        4,
        6,
    ]


def test_rows_are_mixed_within_a_window_of_blocks_only():
    order = RowOrder([10] * 12, seed=0, name="x")
    for start in range(0, 120, 10 * WINDOW):
        assert len({order.row_at(p) // 10 for p in range(start, start + 10 * WINDOW)}) == WINDOW


def test_as_they_lie():
    order = RowOrder([3, 4], seed=0, name="x", shuffle=False)
    assert [order.row_at(p) for p in range(9)] == [0, 1, 2, 3, 4, 5, 6, 0, 1]
