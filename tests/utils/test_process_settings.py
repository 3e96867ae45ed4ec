"""What a reward changes in the process does not change the run: it is set back, with one warning."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from pathlib import Path

import pytest
import torch

from ratchet.rewards.base import FunctionReward
from ratchet.runs.run_dir import RunDirectory
from ratchet.testing import answered
from ratchet.training.start import resume_run, start_run
from ratchet.types import Message, Scored, Task
from ratchet.utils.process_settings import keep_settings, restore_settings

TASK = Task("1", (Message("user", "q"),), answer="a")
CHANGES = {
    "torch.set_num_threads": (torch.get_num_threads, torch.set_num_threads, 17),
    "torch.set_default_dtype": (torch.get_default_dtype, torch.set_default_dtype, torch.float64),
    "torch.set_default_device": (lambda: torch.empty(0).device, torch.set_default_device, "meta"),
    "torch.set_grad_enabled": (torch.is_grad_enabled, torch.set_grad_enabled, False),
    "torch.use_deterministic_algorithms": (
        torch.are_deterministic_algorithms_enabled,
        torch.use_deterministic_algorithms,
        True,
    ),
    "torch.set_float32_matmul_precision": (
        torch.get_float32_matmul_precision,
        torch.set_float32_matmul_precision,
        "medium",
    ),
    "torch.set_autocast_enabled": (
        lambda: torch.is_autocast_enabled("cpu"),
        lambda value: torch.set_autocast_enabled("cpu", value),
        True,
    ),
    "os.chdir": (os.getcwd, os.chdir, "/"),
}

RECIPE = """
model: {preset: tiny}
tokenizer: {kind: characters}
environment: {kind: arithmetic, digits: 1}
algorithm: {kind: grpo, group_size: 2}
rewards: [{kind: "changing_judge:judge"}]
sampling: {max_new_tokens: 4}
steps: 1
batch_size: 2
evaluation: {tasks: 0}
"""


@pytest.mark.parametrize("name", CHANGES)
def test_a_setting_that_a_reward_changes_is_set_back(name, caplog):
    read, write, value = CHANGES[name]
    before = read()

    def judge(trajectory, task):
        write(value)
        return 1.0

    reward = FunctionReward(judge)
    with keep_settings():
        for _ in range(2):
            outcomes = asyncio.run(reward.score([answered(TASK, "a")], TASK))
            assert outcomes == [Scored(1.0, {"judge": 1.0})]
            assert read() == before
    (warning,) = caplog.messages
    assert f"judge changed what {name} sets, from " in warning


def test_the_run_directory_is_found_again(tmp_path: Path, monkeypatch, caplog):
    """Its path may be relative. The directory to which a reward changes may be deleted."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    run = RunDirectory(Path("run"))
    with run.locked(), keep_settings():
        run.write_or_check_config({"name": "probe"})
        os.chdir("elsewhere")
        (tmp_path / "elsewhere").rmdir()
        run.verify({"name": "probe"})
        assert Path.cwd() == tmp_path
    assert len(caplog.messages) == 1


def test_settings_of_other_threads_are_theirs():
    """A thread that reads PyTorch's number of threads may see that of another one's operation."""
    with keep_settings():
        torch.set_grad_enabled(False)
        thread = threading.Thread(target=restore_settings)
        thread.start()
        thread.join()
        assert not torch.is_grad_enabled()
        restore_settings()
    assert torch.is_grad_enabled()


USER_CODE = """
import os
import torch

def change():
    os.chdir("/")
    torch.set_default_dtype(torch.float64)

def judge(trajectory, task):
    change()
    return float(len(trajectory.messages[-1].text) % 2)

change()
"""


@pytest.mark.medium
def test_what_changes_before_the_first_step_is_set_back(tmp_path: Path, monkeypatch):
    """The recipe's modules are imported, and its rewards called, before the session begins."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "changing_judge.py").write_text(USER_CODE)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    with keep_settings():
        assert start_run("recipe.yaml", [], "run", command="train") == 0
        assert Path.cwd() == tmp_path
        del sys.modules["changing_judge"]
        assert resume_run("run", ["steps=2"], command="train") == 0
        assert Path.cwd() == tmp_path
        assert torch.get_default_dtype() is torch.float32
