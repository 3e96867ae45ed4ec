"""npm's Codex command line, unchanged but for the settings that docs/integrations/responses.md shows."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from commands.clients.test_clients import CLIENTS
from experience.openai_proxy.talk import Scripted, only, serving

from ratchet.types import Trajectory

pytestmark = [pytest.mark.slow, pytest.mark.needs("fastapi"), pytest.mark.needs("openai")]

CODEX = CLIENTS.parents[1] / "node_modules" / ".bin" / "codex"
LINES = (
    'I write it.<tool_call>\n{"name": "exec_command", "arguments": '
    '{"cmd": "printf hi > a.txt; cat a.txt"}}\n</tool_call>',
    "Done.",
)


def test_codex_writes_a_file_in_one_trajectory(
    tmp_path: Path, repository: Path, require: Callable[[str, str], None]
) -> None:
    if shutil.which("npm") is None:
        pytest.skip("Codex is installed by npm")
    require(str(CODEX), "make .venv/clients/installed")
    page = (repository / "docs" / "integrations" / "responses.md").read_text(encoding="utf-8")
    settings = page.partition("## Codex")[2].split("```")[1]
    address = "http://127.0.0.1:8000/v1"
    assert settings.count(address) == 1
    home, directory = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    directory.mkdir()

    async def scene() -> tuple[str, list[Trajectory]]:
        # Its instructions and tools are 27,000 tokens of bytes.
        async with serving(Scripted(LINES), max_context=100_000) as (session, client):
            url = str(client.base_url).rstrip("/")
            (home / "config.toml").write_text(settings.replace(address, url), encoding="utf-8")
            process = await asyncio.create_subprocess_exec(
                CODEX,
                "exec",
                "--skip-git-repo-check",
                "--dangerously-bypass-approvals-and-sandbox",
                "Write hi into a.txt.",
                cwd=directory,
                env=os.environ | {"CODEX_HOME": str(home), "OPENAI_API_KEY": client.api_key},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
            )
            output, _ = await asyncio.wait_for(process.communicate(), 120)
            assert process.returncode == 0, output.decode()[-3000:]
            return output.decode(), session.trajectories(0, None, {})

    output, rows = asyncio.run(scene())
    assert output.rstrip().endswith("Done.")
    assert (directory / "a.txt").read_text(encoding="utf-8") == "hi"
    assert len(only(rows).turns) == 2
