"""Commands whose output can't be written, and pipes that are not their output."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ratchet.cli.errors import explain_error
from ratchet.errors import CheckpointError

RATCHET = [sys.executable, "-m", "ratchet.cli.main"]
BREAKS = """
import os, sys
from ratchet.cli import main
import ratchet.commands.explain_algorithm as command
def broken(*args, **named):
    reader, writer = os.pipe()
    os.close(reader)
    os.write(writer, b"x")
for name in [n for n, v in vars(command).items() if callable(v) and v.__module__ == command.__name__]:
    setattr(command, name, broken)
sys.argv = ["ratchet", "explain-algorithm", "grpo"]
main.main()
"""


@pytest.mark.slow
def test_a_full_disk_is_a_sentence():
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*RATCHET, "explain-algorithm", "grpo"], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "nothing more can be written" in done.stderr


@pytest.mark.slow
def test_a_broken_pipe_to_another_process_is_told():
    done = subprocess.run([sys.executable, "-c", BREAKS], capture_output=True, text=True)
    assert done.returncode == 1
    assert "the connection to another process broke" in done.stderr


@pytest.mark.slow
def test_a_reader_that_has_enough_is_no_error():
    with subprocess.Popen(
        [*RATCHET, "explain-algorithm", "grpo"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as command:
        command.stdout.close()
        assert b"Traceback" not in command.stderr.read()


def test_a_library_in_rust_gives_the_text_of_the_error_alone():
    explanation = explain_error(
        RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)")
    )
    assert explanation is not None
    assert "nothing more can be written" in explanation[0]


def test_an_error_of_a_full_disk_says_how_to_go_on():
    error = CheckpointError("'state' can't be written: [Errno 28] No space left on device")
    message, status = explain_error(error) or ("", 0)
    assert message.startswith("CheckpointError: 'state' can't be written")
    assert message.endswith(
        "Make room where the output goes. See docs/by-symptom.md#the-disk-is-full"
    )
    assert status == 1


@pytest.mark.parametrize("text", ["CUDA error: out of memory", "CUDA out of memory. Tried 2 GiB."])
def test_the_section_about_memory_is_a_sentence_of_its_own(text):
    message, status = explain_error(torch.OutOfMemoryError(text)) or ("", 0)
    assert message.endswith(f"{text.rstrip('.')}. See docs/by-symptom.md#out-of-memory")
    assert status == 2


def test_a_name_that_is_no_utf8_is_no_bug():
    with pytest.raises(UnicodeEncodeError) as error:
        "run\udcff".encode()
    message, status = explain_error(error.value) or ("", 0)
    assert "a name is not valid UTF-8" in message
    assert status == 2


def test_a_path_that_is_too_long_is_no_bug():
    with pytest.raises(OSError, match="too long") as error:
        Path("x" * 256).stat()
    message, status = explain_error(error.value) or ("", 0)
    assert message.startswith("a path is too long (")
    assert "): shorten xxx" in message
    assert status == 2


def test_too_many_open_files_are_no_bug():
    message, status = explain_error(OSError(errno.EMFILE, "Too many open files", "a.txt")) or (
        "",
        0,
    )
    assert message.startswith("too many files are open (")
    assert "Raise `ulimit -n`" in message
    assert status == 1


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
def test_a_place_that_refuses_files_is_no_bug(number):
    error = OSError(number, os.strerror(number), "somewhere/a.py")
    message, status = explain_error(error) or ("", 0)
    assert message.startswith("somewhere/a.py can't be used (")
    assert message.endswith(
        f"{os.strerror(number)}. Choose another place, or allow this user to use it"
    )
    assert status == 1


def test_windows_is_refused_with_the_way_to_linux():
    code = "import sys; sys.platform = 'win32'; from ratchet.__main__ import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "wsl --install" in done.stderr
