import json
import os
import signal
import threading

import pytest

from ratchet.errors import RunDirectoryError
from ratchet.observe.stall_report import waiting
from ratchet.runs.live_status import query_status, serve_status
from ratchet.runs.run_dir import RunDirectory


@pytest.fixture
def directory(tmp_path):
    made = RunDirectory(tmp_path)
    made.write_or_check_config({"name": "run"})
    return made


def test_a_run_says_who_waits_for_whom(directory):
    with serve_status(directory), waiting("the loop", "update", "learner rank 1", 30):
        text = query_status(directory.path)
    assert "the loop" in text
    assert "learner rank 1" in text
    assert text.endswith("30 s")
    assert not directory.status.exists()


def test_it_answers_while_its_main_thread_is_busy(directory):
    with serve_status(directory):
        said = []
        asking = threading.Thread(target=lambda: said.append(query_status(directory.path)))
        asking.start()
        asking.join()
    assert said == [f"process {os.getpid()} waits for no other process"]


def test_sigusr1_writes_it(directory, capsys):
    with serve_status(directory), waiting("the loop", "update", "learner rank 1", 30):
        os.kill(os.getpid(), signal.SIGUSR1)
    assert "learner rank 1" in capsys.readouterr().err


def test_where_no_run_is(directory, tmp_path):
    with pytest.raises(RunDirectoryError, match="holds no run"):
        query_status(tmp_path / "other")
    with pytest.raises(RunDirectoryError, match="no run is under way"):
        query_status(directory.path)
    directory.status.write_text('{"pid": 1, "host": "elsewhere", "socket": ""}')
    with pytest.raises(RunDirectoryError, match=r"is under way on elsewhere. Run"):
        query_status(directory.path)
    directory.status.write_text(
        json.dumps({"pid": 1, "host": os.uname().nodename, "socket": "/nowhere"})
    )
    with pytest.raises(RunDirectoryError, match=r"process 1, .* does not answer"):
        query_status(directory.path)


def test_the_status_of_another_run_stays(directory):
    with serve_status(directory):
        directory.status.write_text('{"pid": 1}')
    assert directory.status.exists()
    directory.status.unlink()
    with serve_status(directory):
        directory.status.unlink()
        directory.status.mkdir()
    assert directory.status.is_dir()
