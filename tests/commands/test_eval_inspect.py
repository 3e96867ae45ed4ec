"""`ratchet eval --inspect`: what is refused before a model is loaded."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from command_line import ratchet

from ratchet.commands.eval_inspect import INSPECT, InspectSettings, make_command
from ratchet.errors import ConfigError


@pytest.mark.medium
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "--inspect", "typo.py@sums"], "names typo.py, which is not a file"),
        (["run", "--inspect", "a/sums", "--samples", "4"], "--samples has no effect beside"),
        (["run", "size=3", "--inspect", "a/sums"], "remove size=3"),
        (["run", "--inspect", "a/sums", "--on", "gsm8k"], "remove --on"),
        (["http://127.0.0.1:9/v1", "--inspect", "a/sums"], "is served already"),
    ],
)
def test_what_it_does_not_take_is_named(arguments: list[str], message: str) -> None:
    done = ratchet("eval", *arguments)
    assert done.returncode == 2
    assert message in done.stderr


def test_the_program_is_on_path_or_beside_the_interpreter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(ConfigError, match="pip install inspect-ai"):
        INSPECT.find()
    program = tmp_path / "inspect"
    program.touch(mode=0o755)
    assert INSPECT.find() == str(program)


def test_only_what_is_set_overrides_the_task() -> None:
    command = make_command("inspect", InspectSettings("a.py", tasks=3, temperature=0.0), Path("l"))
    assert command[:3] == ["inspect", "eval", "a.py"]
    assert command[-4:] == ["--limit", "3", "--temperature", "0.0"]
    assert "--max-tokens" not in command
