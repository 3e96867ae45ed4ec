"""Calls of a group: order, results, errors, deadlines."""

import asyncio
import os
import sys
import sysconfig
import threading
import venv
from pathlib import Path

import numpy as np
import pytest
import torch
from executors.components import arrays

from ratchet.config.schema import RunConfig
from ratchet.errors import (
    CallTimeout,
    ConfigError,
    DataError,
    PortBusy,
    VersionMismatch,
    WorkerRaised,
)
from ratchet.executors.config import LocalClusterConfig
from ratchet.executors.local import LocalExecutor
from ratchet.executors.placement import ResourceRequest
from ratchet.executors.protocol import pack
from ratchet.observe import stall_report
from ratchet.training.from_config import build_executor
from ratchet.worker_protocols import Executor, Workers


@pytest.mark.medium
def test_results_come_by_rank_and_calls_in_order(start):
    group = start(2, "executors.components:plain", {"value": 10})
    assert [place.rank for place in group.call_now("where")] == [0, 1]
    calls = [group.submit("add", 1) for _ in range(5)]
    assert [call.result() for call in calls] == [[11 + i, 12 + i] for i in range(5)]
    assert group.submit_each("add", [(1,), (2,)]).result() == [16, 18]
    with pytest.raises(ValueError, match="2 ranks: 1 tuples"):
        group.submit_each("add", [(1,)])


async def both(group):
    return await asyncio.gather(group.call("add", 1), group.each("add_later", [(1,), (2,)]))


def test_async_callers_and_async_methods(start):
    assert asyncio.run(both(start(2))) == [[1, 1], [2, 3]]


def test_a_synchronous_caller_inside_a_running_loop(start):
    group = start(1)

    async def caller():
        return group.call_now("add", 7)

    assert asyncio.run(caller()) == [7]


@pytest.fixture
def other_python(tmp_path):
    """The Python of another environment, which finds this one's packages after its own."""
    environment = tmp_path / "environment"
    venv.create(environment, symlinks=True)
    (packages,) = environment.glob("lib/python*/site-packages")
    (packages / "shared.pth").write_text(sysconfig.get_path("purelib"))
    return str(environment / "bin" / "python")


@pytest.mark.medium
def test_a_role_may_have_the_python_of_another_environment(other_python):
    executor = LocalExecutor(LocalClusterConfig(), threads=2, device="cpu", preload=())
    roles = {"learner": None, "generator": other_python}
    try:
        executor.plan([ResourceRequest(role, 1, interpreter=p) for role, p in roles.items()])
        groups = [executor.group(role) for role in roles]
        for group in groups:
            group.build_now("executors.components:Tiny")
        prefixes = [group.call_now("prefix") for group in groups]
        assert prefixes == [[sys.prefix], [str(Path(other_python).parents[1])]]
        assert groups[1].call_now("double", np.arange(3))[0].tolist() == [0, 2, 4]
    finally:
        executor.close()


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (None, "can't be run: .* Name the Python of an environment"),
        ("exit 3", "has no Ratchet: .* -m pip install ratchet-rl"),
        ("echo 2.7", r"is Python 2\.7, and the run's is 3"),
    ],
)
def test_a_python_that_can_t_serve_is_refused(script, reason, tmp_path):
    program = tmp_path / "python"
    if script is not None:
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
    executor = LocalExecutor(LocalClusterConfig(), threads=2, device="cpu")
    with pytest.raises(ConfigError, match=reason):
        executor.plan([ResourceRequest("generator", 1, interpreter=str(program))])


@pytest.mark.medium
def test_places(start):
    first, second = start(2).call_now("where")
    assert (first.role, first.rank, first.world_size, first.local_rank) == ("learner", 0, 2, 0)
    assert (second.rank, second.local_rank, second.device, second.threads) == (1, 1, "cpu", 1)
    assert first.rendezvous == second.rendezvous
    alone = start(1)
    assert alone.call_now("environ", "OMP_NUM_THREADS") == ["2"]
    assert alone.call_now("environ", "CUDA_VISIBLE_DEVICES") == [""], "a rank on the CPU sees none"


@pytest.mark.slow
def test_arrays_and_tensors_arrive_whole_and_writable(start):
    group = start(1)
    for name, array in arrays().items():
        (back,) = group.call_now("double", array.copy())
        np.testing.assert_array_equal(back, array * 2, err_msg=name)
        back += 1
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        tensor = torch.arange(24).reshape(2, 3, 4).to(dtype)[:, 1:]
        (back,) = group.call_now("double", tensor)
        assert back.dtype == dtype
        assert torch.equal(back, tensor * 2)
        back += 1
    (back,) = group.call_now("double", torch.tensor(3.0))
    assert back.shape == ()
    assert group.call_now("double", torch.zeros(0, 3))[0].shape == (0, 3)


def test_an_error_comes_back_as_itself_with_the_rank(start):
    group = start(2)
    with pytest.raises(KeyError, match="no such thing") as caught:
        group.call_now("fail", 1)
    (note,) = caught.value.__notes__
    assert f"raised in learner rank 1 of 2 on {os.uname().nodename}" in note
    assert "in fail" in note
    assert group.call_now("fail", 2) == ["fine", "fine"]  # the group goes on


@pytest.mark.parametrize(
    ("method", "says"),
    [
        ("fail_oddly", "Unpicklable: odd"),
        ("leave", "SystemExit: 3"),
        ("unsendable", "lambda"),
        ("nothing", "no attribute"),
    ],
)
def test_what_cannot_be_sent_or_found(start, method, says):
    group = start(1)
    with pytest.raises((WorkerRaised, AttributeError, Exception), match=says):
        group.call_now(method)
    assert group.call_now("add", 1) == [1]


@pytest.mark.medium
def test_a_factory_that_fails(start):
    with pytest.raises(ValueError, match="can't be made"):
        start(2, "executors.components:broken")
    with pytest.raises(Exception, match="no 'Tinny'; did you mean"):
        start(1, "executors.components:Tinny")


@pytest.mark.medium
def test_a_deadline_names_who_is_late_and_ends_the_group(start):
    group = start(2)
    said = r"^learner rank 1 of 2 on .* did not answer 'hang' within 0.2 s \(for the loop\)"
    with pytest.raises(CallTimeout, match=said) as late:
        group.within(0.2, owner="the loop").call_now("hang", 1)
    assert "the loop  learner rank 1 of 2" in str(late.value)
    assert "was sent 'hang'" in str(late.value)
    assert "answered 'hang'" in str(late.value), "rank 0"
    with pytest.raises(CallTimeout):
        group.call_now("add", 1)
    assert group.final_error is not None


@pytest.mark.medium
def test_an_error_does_not_wait_for_ranks_that_wait_for_it(start, monkeypatch):
    monkeypatch.setattr("ratchet.executors.worker_group.GRACE_S", 0.2)
    group = start(2)
    with pytest.raises(KeyError) as caught:
        group.call_now("fail_and_hang", 0)
    assert "rank 1 of 2" in caught.value.__notes__[-1]
    assert "so the group was ended" in caught.value.__notes__[-1]
    assert isinstance(group.final_error, CallTimeout)


@pytest.mark.medium
def test_waits_are_in_the_table_while_they_last(start, monkeypatch):
    group = start(2)
    call = group.within(50, owner="the loop").submit("hang", 1)
    while "rank 0 of 2" in stall_report.format_waits():
        pass
    header, row = stall_report.format_waits().splitlines()
    assert header.split() == ["waiting", "waits", "for", "to", "since", "at", "most"]
    assert row.startswith(f"the loop  learner rank 1 of 2 on {os.uname().nodename}  hang")
    assert row.endswith("50 s")
    monkeypatch.setattr("ratchet.executors.worker_group.CLOSE_S", 0.1)
    group.close()
    assert call.exception() is not None
    assert "waits for no other process" in stall_report.format_waits()


@pytest.mark.medium
@pytest.mark.fault("P17")
def test_a_busy_port_is_named(start):
    import socket

    group = start(1)
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen()
        port = listener.getsockname()[1]
        group.places[0] = group.places[0].__class__(
            **{**vars(group.places[0]), "rendezvous": f"127.0.0.1:{port}-{port}"}
        )
        with pytest.raises(PortBusy, match=f"none of the ports {port} to {port} is free"):
            group.build_now("executors.components:Tiny")


def test_another_version_is_refused_by_name(start, monkeypatch):
    monkeypatch.setattr("ratchet.executors.protocol.PROTOCOL", 99)
    with pytest.raises(
        VersionMismatch,
        match=r"rank 0 of 1 .* another version than the driver: protocol 99 in the driver and 2 in the worker",
    ):
        start(1)


def test_the_driver_can_read_what_a_worker_wrote(start):
    group = start(1)
    group.call_now("say", "a line")
    assert group.members[0].read_log_tail() == "a line"


@pytest.mark.slow
def test_a_recipe_chooses_the_executor():
    recipe = {
        "model": {"preset": "tiny"},
        "tokenizer": {"kind": "characters"},
        "threads": 3,
        "device": "cpu",
    }
    stage = {"name": "a", "algorithm": {"kind": "sft"}, "environment": {"kind": "sorting"}}
    executor = build_executor(RunConfig.model_validate({**recipe, "stages": [stage]}))
    assert isinstance(executor, LocalExecutor)
    assert isinstance(executor, Executor)
    executor.plan([ResourceRequest("learner", 3)])
    group = executor.group("learner")
    assert isinstance(group, Workers)
    assert group.places[0].threads == 1
    executor.close()
    torchrun = RunConfig.model_validate(
        {**recipe, "stages": [stage], "cluster": {"kind": "torchrun"}}
    )
    with pytest.raises(ConfigError, match="needs several processes that torchrun started"):
        build_executor(torchrun)


@pytest.mark.medium
def test_what_several_ranks_are_given_is_packed_once(start, monkeypatch):
    group, packed = start(3), []
    monkeypatch.setattr(
        "ratchet.executors.worker_group.pack", lambda value: packed.append(value) or pack(value)
    )
    shared = (np.arange(4.0),)
    for back, sent in zip(
        group.submit_each("double", [shared, (np.ones(2),), shared]).result(),
        [shared, (np.ones(2),), shared],
        strict=True,
    ):
        np.testing.assert_array_equal(back, sent[0] * 2)
    assert len(packed) == 2


@pytest.mark.parametrize("value", [lambda: 0, threading.Lock(), (i for i in "a")])
def test_what_can_not_be_sent_is_refused_in_a_sentence(value):
    with pytest.raises(DataError, match=r"a value can't be sent between processes: .*pickle"):
        pack({"meta": value})
