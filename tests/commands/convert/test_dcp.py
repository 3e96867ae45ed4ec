"""Directories of torch.distributed.checkpoint: what torch writes is read, and the reverse; nothing
in them is executed."""

from __future__ import annotations

import os
import pickle

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp

from ratchet.commands.convert.dcp import INDEX, DcpFiles, write_chunks, write_index
from ratchet.errors import CheckpointError
from ratchet.protocols import Shard

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def test_what_torch_writes_is_read(tmp_path):
    state = {"model": {"a": torch.randn(4, 6).bfloat16(), "b": torch.arange(3)}, "step": 7}
    torch_dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    files = DcpFiles(tmp_path)
    assert set(files.tensors) == {"model.a", "model.b"}
    assert (files.shape("model.a"), files.dtype("model.a")) == ((4, 6), torch.bfloat16)
    assert torch.equal(files.block("model.a", (1, 2), (2, 3)), state["model"]["a"][1:3, 2:5])


def test_torch_reads_what_is_written(tmp_path):
    whole = torch.randn(4, 6)
    parts = [
        write_chunks(
            tmp_path / f"__{i}_0.distcp", [Shard("a", (4, 6), (2 * i, 0), whole[2 * i : 2 * i + 2])]
        )
        for i in (0, 1)
    ]
    write_index(tmp_path, [chunk for part in parts for chunk in part])
    found = {"a": torch.zeros(4, 6)}
    torch_dcp.load(found, checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(found["a"], whole)
    assert torch.equal(DcpFiles(tmp_path).block("a", (1, 0), (2, 6)), whole[1:3])
    assert (tmp_path / "__0_0.distcp").stat().st_size < 3000, (
        "a view was written with the storage behind it"
    )


class Hostile:
    def __reduce__(self):
        return os.mkdir, ("was-executed",)


@pytest.mark.fault("S1")
def test_an_index_that_would_run_code_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / INDEX).write_bytes(pickle.dumps(Hostile()))
    with pytest.raises(CheckpointError, match=r"names posix.mkdir"):
        DcpFiles(tmp_path)
    assert not (tmp_path / "was-executed").exists()


@pytest.mark.parametrize("content", [b"", b"\x80", b"not a pickle", pickle.dumps({"a": 1})])
def test_a_damaged_index_is_an_error_of_the_checkpoint(tmp_path, content):
    (tmp_path / INDEX).write_bytes(content)
    with pytest.raises(CheckpointError, match="can't be read"):
        DcpFiles(tmp_path)


@pytest.mark.parametrize("damage", ["missing", "short"])
def test_a_damaged_file_is_found(tmp_path, damage):
    torch_dcp.save({"a": torch.randn(40, 40)}, checkpoint_id=tmp_path, no_dist=True)
    (path,) = tmp_path.glob("*.distcp")
    content = path.read_bytes()
    path.unlink()
    if damage == "short":
        path.write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match=r"'a' in .* is missing or damaged"):
        DcpFiles(tmp_path).block("a", (0, 0), (40, 40))


def test_numbers_that_no_file_has_are_missed(tmp_path):
    write_index(
        tmp_path, write_chunks(tmp_path / "__0_0.distcp", [Shard("a", (4,), (0,), torch.zeros(3))])
    )
    with pytest.raises(CheckpointError, match="lacks 1 elements of 'a'"):
        DcpFiles(tmp_path).block("a", (0,), (4,))
