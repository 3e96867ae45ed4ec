"""What a run takes from the machine is measured once, and then a fact of the run."""

import gc
import subprocess
import sys

import pytest
import torch
import yaml

from ratchet.config.loader import load_config
from ratchet.data.chat import chat_templates
from ratchet.errors import ConfigError
from ratchet.executors import freeze as machine
from ratchet.executors import threads as threads_module
from ratchet.executors.freeze import freeze, prepare_process
from ratchet.executors.threads import (
    choose_threads,
    count_usable_cores,
    describe_threads,
    find_thread_limit,
    measure_worker_count,
    read_width,
)
from ratchet.training.from_config import build_policy
from ratchet.types import Message

RECIPE = {
    "device": "cpu",
    "model": {"preset": "tiny"},
    "tokenizer": {"kind": "characters"},
    "environment": {"kind": "sorting"},
    "steps": 1,
    "stages": [
        {"name": "a", "algorithm": {"kind": "sft"}},
        {"name": "b", "algorithm": {"kind": "grpo", "group_size": 4}},
    ],
}


def config(tmp_path, **changes):
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(RECIPE | changes))
    return load_config(path)


def workers_of(made):
    return [stage.learner.workers for stage in made.stages]


@pytest.mark.parametrize(
    ("threads", "most"), [(1, 1), (2, 2), (3, 3), (4, 4), (6, 3), (7, 1), (8, 4)]
)
def test_threads_are_shared_out_evenly_among_workers(threads, most, monkeypatch):
    seconds = iter([2.0, 1.0])  # sharing every operation takes twice as long
    monkeypatch.setattr(threads_module, "measure_shortest", lambda work: next(seconds))
    before = torch.get_num_threads()
    assert measure_worker_count(threads) == most
    assert torch.get_num_threads() == before


def test_where_sharing_every_operation_is_clearly_faster_there_is_one_worker(monkeypatch):
    for apart, expected in ((1.1, 2), (1.3, 1)):
        seconds = iter([1.0, apart])
        monkeypatch.setattr(
            threads_module, "measure_shortest", lambda work, seconds=seconds: next(seconds)
        )
        assert measure_worker_count(2) == expected


@pytest.mark.medium
def test_the_probe_really_runs():
    assert measure_worker_count(2) in (1, 2)


def test_what_is_left_to_the_machine_is_frozen_and_what_is_set_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "measure_worker_count", lambda threads: threads)
    frozen = freeze(config(tmp_path, threads=2))
    assert workers_of(frozen) == [2, 2]
    assert workers_of(freeze(config(tmp_path, threads=2, learner={"workers": 1}))) == [1, 1]
    assert freeze(config(tmp_path)).threads <= find_thread_limit()[0]
    monkeypatch.setattr(
        machine, "measure_worker_count", lambda threads: pytest.fail("nothing was left to measure")
    )
    assert freeze(frozen) == frozen


@pytest.mark.parametrize(
    ("value", "expected"), [("1", 1), ("2", 2), ("3,1", 3), ("9", 4), ("0", 4), ("x", 4), ("", 4)]
)
def test_omp_num_threads_bounds_the_automatic_choice(value, expected, monkeypatch):
    monkeypatch.setattr(threads_module, "count_usable_cores", lambda: 4)
    threads, reason = find_thread_limit({"OMP_NUM_THREADS": value})
    assert threads == expected
    assert ("OMP_NUM_THREADS" in reason) == (expected < 4)
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    assert f"at most {expected} " in describe_threads()


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"cpu.max": "150000 100000\n"}, 1.5),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "300000", "cpu/cpu.cfs_period_us": "100000"}, 3.0),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ({}, None),
    ],
)
def test_a_containers_quota_bounds_the_cores(files, expected, tmp_path, monkeypatch):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert threads_module._read_cpu_quota(tmp_path) == expected
    monkeypatch.setattr(threads_module, "_read_cpu_quota", lambda: 0.5)
    assert count_usable_cores() == 1


def test_one_thread_is_chosen_unless_more_are_faster(tmp_path, monkeypatch):
    monkeypatch.setattr(threads_module, "find_thread_limit", lambda: (2, "2 usable cores"))
    model = config(tmp_path).model
    assert read_width(model) == 64
    for alone, expected in ((1.0, 1), (1.04, 1), (1.5, 2), (0.001, 1)):
        times = {1: alone, 2: 1.0}
        monkeypatch.setattr(
            threads_module, "measure_once", lambda work, t=times: t[torch.get_num_threads()]
        )
        threads, reason = choose_threads(model)
        assert (threads, f"{max(alone, 1 / alone):,.2f} times" in reason) == (expected, True)
    assert reason.endswith("with 2 threads four layers take 1,000.00 times as long as with 1")
    wide = model.model_copy(update={"overrides": {"hidden_size": 4096}})
    assert choose_threads(wide) == (2, "2 usable cores")  # without a measurement


@pytest.mark.fault("P18")
def test_a_resumed_run_prints_the_day_it_began_on(tmp_path, monkeypatch):
    monkeypatch.setattr(chat_templates, "_printed_date", None)
    template = "{{ strftime_now('%d %b %Y') }}{% for m in messages %}{{ m.content }}{% endfor %}"
    written = config(tmp_path, tokenizer={"kind": "bytes", "template": template})
    frozen = freeze(written)
    assert frozen.tokenizer.date is not None
    another_day = written.tokenizer.model_copy(update={"date": "2001-02-03"})
    begun = frozen.model_copy(update={"tokenizer": another_day})
    assert freeze(begun) == begun
    policy = build_policy(begun)
    prompt = policy.renderer.prompt([Message("user", "!")])
    assert policy.tokenizer.decode(prompt) == "03 Feb 2001!"
    # Templates that print no date leave the configuration as it was written.
    assert freeze(config(tmp_path)).tokenizer.date is None
    for date in ("yesterday", "2026-1-31"):
        with pytest.raises(ConfigError, match="write it as 2026-01-31"):
            config(tmp_path, tokenizer={"kind": "bytes", "date": date})


@pytest.mark.medium
def test_the_process_gets_the_runs_threads_and_a_collector_that_rests():
    before, thresholds = torch.get_num_threads(), gc.get_threshold()
    gc.unfreeze()  # what the collection of tests froze
    try:
        prepare_process(2)
        assert torch.get_num_threads() == 2
        frozen = gc.get_freeze_count()
        assert frozen
        # by default some hundreds or thousands, by the version of Python
        assert gc.get_threshold()[0] > 10_000
        prepare_process("auto")
        assert torch.get_num_threads() == find_thread_limit()[0]
        # once is enough: garbage of an earlier run must not stay for ever
        assert gc.get_freeze_count() <= frozen
    finally:
        torch.set_num_threads(before)
        gc.set_threshold(*thresholds)


FREED = """
import resource, sys, torch
from ratchet.executors.freeze import keep_freed_memory
torch.set_num_threads(1)
if sys.argv[1] == "kept":
    keep_freed_memory()
def faults():
    torch.zeros(2**24).add_(1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        torch.zeros(2**24).add_(1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(faults())
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="an allocator of another system")
def test_freed_memory_stays_with_the_process():
    def faults(mode):
        done = subprocess.run(
            [sys.executable, "-c", FREED, mode], capture_output=True, text=True, check=True
        )
        return int(done.stdout)

    assert 2 * faults("kept") < faults("given back")  # pages that the kernel had to clear
