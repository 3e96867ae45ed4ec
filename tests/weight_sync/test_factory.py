"""Sections become links between the ends that there are."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest
from weight_sync.components import Kept

from ratchet.config.resolve import resolve
from ratchet.errors import ConfigError
from ratchet.testing.fakes import FakeLearner
from ratchet.weight_sync.collective import CollectiveWeightSync
from ratchet.weight_sync.endpoints import LocalRank
from ratchet.weight_sync.factory import SyncEndpoints, make_weight_sync
from ratchet.weight_sync.files import FilesWeightSync
from ratchet.weight_sync.handover import HandoverWeightSync
from ratchet.weight_sync.in_process import SharedWeightSync
from ratchet.weight_sync.shared_memory import SharedMemoryWeightSync


class Embedded(Kept):
    shares_weights = True


RANKS, ALONE = LocalRank(None), FakeLearner(2)


@pytest.mark.parametrize(
    ("recipe", "between", "made"),
    [
        ({}, {"learner": ALONE, "generator": Embedded()}, SharedWeightSync),
        ({}, {"learner": ALONE, "generator": Kept()}, SharedMemoryWeightSync),
        ({}, {"learner": ALONE, "generator": Kept(), "on_accelerator": True}, HandoverWeightSync),
        (
            {},
            {"learner": RANKS, "generator": Kept(), "on_accelerator": True},
            SharedMemoryWeightSync,
        ),
        ({}, {"learner": RANKS, "generator": Embedded()}, SharedMemoryWeightSync),
        ({}, {"learner": RANKS, "generator": Kept(), "one_host": False}, CollectiveWeightSync),
        ({"kind": "shared"}, {"learner": ALONE, "generator": Embedded()}, SharedWeightSync),
        (
            {"kind": "shared_memory"},
            {"learner": RANKS, "generator": Kept()},
            SharedMemoryWeightSync,
        ),
        ({"kind": "collective"}, {"learner": RANKS, "generator": Kept()}, CollectiveWeightSync),
        ({"kind": "files"}, {"learner": RANKS, "generator": Kept()}, FilesWeightSync),
        ({"kind": "delta"}, {"learner": RANKS, "generator": Kept()}, FilesWeightSync),
        (
            {"kind": "delta", "through": "shared_memory"},
            {"learner": RANKS, "generator": Kept()},
            SharedMemoryWeightSync,
        ),
        (
            {"kind": "delta", "through": "collective"},
            {"learner": RANKS, "generator": Kept()},
            CollectiveWeightSync,
        ),
    ],
)
def test_each_kind_is_its_link(recipe, between, made):
    link = make_weight_sync(resolve("weight_sync", recipe), SyncEndpoints(**between))
    assert type(link) is made
    transport = getattr(link, "transport", None)
    assert (transport is not None and transport.changes_only) == (recipe.get("kind") == "delta")


def test_keys_reach_the_link(tmp_path):
    between = SyncEndpoints(
        RANKS, Kept(), receivers=RANKS, receivers_count=3, directory=tmp_path, run="mine"
    )
    own = {"dtype": "float16", "timeout_s": 5.0}
    for recipe in (
        {"kind": "auto"},
        {"kind": "shared_memory"},
        {"kind": "collective"},
        {"kind": "files"},
        {"kind": "delta"},
    ):
        link = make_weight_sync(resolve("weight_sync", {**recipe, **own}), between)
        assert (link.transport.dtype, link.timeout_s, link.receivers) == ("float16", 5.0, RANKS)
    network = {"kind": "collective", "backend": "nccl", "host": "10.0.0.1", "bucket_mib": 3}
    link = make_weight_sync(resolve("weight_sync", network), between)
    sent = link.transport
    assert (sent.backend, sent.host, sent.bucket_bytes, sent.n_receivers) == (
        "nccl",
        "10.0.0.1",
        3 * 2**20,
        3,
    )
    assert (
        make_weight_sync(resolve("weight_sync", {"kind": "files"}), between).directory
        == tmp_path / "weight_sync"
    )
    chosen = {"kind": "files", "directory": str(tmp_path / "other")}
    assert make_weight_sync(resolve("weight_sync", chosen), between).directory == tmp_path / "other"
    assert make_weight_sync(resolve("weight_sync", {}), between).run == "mine"
    assert (
        make_weight_sync(resolve("weight_sync", {"kind": "delta"}), between).transport.dtype
        == "bfloat16"
    )


@pytest.mark.parametrize(("one_host", "host"), [(True, "127.0.0.1"), (False, socket.gethostname())])
def test_others_reach_the_driver_at_an_address_that_they_can(one_host, host):
    between = SyncEndpoints(RANKS, Kept(), one_host=one_host)
    assert (
        make_weight_sync(resolve("weight_sync", {"kind": "collective"}), between).transport.host
        == host
    )
    for kind in ({"kind": "collective"}, {"kind": "delta", "through": "collective"}):
        section = resolve("weight_sync", {**kind, "host": "10.0.0.1"})
        assert make_weight_sync(section, between).transport.host == "10.0.0.1"


def test_without_anonymous_files_weights_go_through_files(tmp_path, monkeypatch):
    monkeypatch.delattr("os.memfd_create")
    between = SyncEndpoints(ALONE, Kept(), receivers=RANKS, directory=tmp_path)
    assert type(make_weight_sync(resolve("weight_sync", {}), between)) is FilesWeightSync


SHARED = """
import sys
from types import SimpleNamespace
from ratchet.config.resolve import resolve
from ratchet.weight_sync.factory import SyncEndpoints, make_weight_sync

make_weight_sync(resolve("weight_sync", {}), SyncEndpoints(SimpleNamespace(), SimpleNamespace(shares_weights=True)))
print(*sorted(name for name in sys.modules if name in {"torch", "safetensors"} or name.startswith("ratchet.weight_sync.")))
"""


@pytest.mark.medium
def test_shared_weights_need_no_transport():
    done = subprocess.run(
        [sys.executable, "-c", SHARED], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [
        "ratchet.weight_sync.config",
        "ratchet.weight_sync.factory",
        "ratchet.weight_sync.in_process",
    ]


def test_weights_that_are_not_shared_are_not_taken_for_shared():
    with pytest.raises(ConfigError, match=r"Set weight_sync\.kind=auto"):
        make_weight_sync(resolve("weight_sync", {"kind": "shared"}), SyncEndpoints(ALONE, Kept()))
