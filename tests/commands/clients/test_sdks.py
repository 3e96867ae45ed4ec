"""The packages `openai` and `anthropic`, unchanged, in each of their APIs."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands.clients.test_clients import CLIENTS, serve_model, write_model
from experience.openai_proxy.talk import CALLS, Scripted, serving

from ratchet.types import Trajectory

pytestmark = [pytest.mark.slow, pytest.mark.needs("fastapi"), pytest.mark.needs("openai")]

SCRIPT = Path(__file__).with_name("ask_sdks.py")


def read_report(output: str) -> dict[str, Any]:
    return json.loads(output.splitlines()[-1])


def test_every_api_of_an_attempt_records_the_same_tokens(
    require: Callable[[str, str], None],
) -> None:
    """Each conversation has two function calls and their outputs, and is one trajectory."""
    require(str(CLIENTS), "make .venv/clients/installed")

    async def scene() -> tuple[dict[str, Any], list[Trajectory]]:
        async with serving(Scripted()) as (session, client):
            process = await asyncio.create_subprocess_exec(
                CLIENTS,
                SCRIPT,
                str(client.base_url).rstrip("/"),
                client.api_key,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
            output, errors = await process.communicate()
            assert process.returncode == 0, errors.decode()[-3000:]
            return read_report(output.decode()), session.trajectories(0, None, {})

    report, rows = asyncio.run(scene())
    texts = {name: tuple(said or "" for said in c) for name, c in report["conversations"].items()}
    assert set(texts.values()) == {("I add.", "", CALLS[2])}
    *rows, completion = rows
    assert len(completion.turns) == 1
    assert [len(row.turns) for row in rows] == [3] * len(texts)
    for row in rows[1:]:
        np.testing.assert_array_equal(row.tokens, rows[0].tokens)
        np.testing.assert_array_equal(row.owner, rows[0].owner)
    assert report["refusals"] == [
        "tool_choice: the request offers no tools to call",
        "there is no response 'resp_x': it was made with another key or with store=false, or it "
        "has been dropped, as only the latest are kept. Send all items as input",
    ]


def test_a_served_model_answers_in_every_api(
    tmp_path: Path, require: Callable[[str, str], None]
) -> None:
    require(str(CLIENTS), "make .venv/clients/installed")
    write_model(tmp_path)
    with serve_model(tmp_path, "--max-new-tokens", "8") as address:
        asked = subprocess.run(
            [CLIENTS, SCRIPT, address, "none"], capture_output=True, text=True, check=False
        )
    assert asked.returncode == 0, asked.stderr[-3000:]
    report = read_report(asked.stdout)
    assert [len(texts) for texts in report["conversations"].values()] == [3] * 7
    assert len(report["refusals"]) == 2
