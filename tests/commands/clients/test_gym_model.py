"""NeMo Gym's model server, unchanged, gets tokens and log-probabilities of `ratchet serve`."""

from __future__ import annotations

from pathlib import Path

import httpx2
import pytest
from commands.clients.test_clients import serve_model, write_model
from environments.servers.started import started

PYTHON = Path(__file__).parents[3] / ".venv" / "nemo-gym" / "bin" / "python"
SCRIPT = Path(__file__).parent / "serve_gym_model.py"


@pytest.mark.slow
@pytest.mark.skipif(
    not PYTHON.exists(), reason="`make` installs NeMo Gym where it finds Python 3.12"
)
def test_nemo_gyms_model_server_gets_tokens(tmp_path):
    write_model(tmp_path, scale=1.0)  # its tokens are random; larger weights round more
    request = {"input": [{"role": "user", "content": "hi"}], "max_output_tokens": 5, "tools": []}
    with serve_model(tmp_path) as url, started(PYTHON, SCRIPT, url) as gym:
        answer = httpx2.post(f"{gym}/v1/responses", json=request, timeout=60, trust_env=False)
        (item,) = answer.raise_for_status().json()["output"]
        tokens = [*item["prompt_token_ids"], *item["generation_token_ids"]]
        scored = {"model": "policy", "prompt": tokens, "max_tokens": 0, "echo": True, "logprobs": 0}
        answer = httpx2.post(f"{url}/completions", json=scored, timeout=60, trust_env=False)
    (choice,) = answer.raise_for_status().json()["choices"]
    assert len(item["generation_token_ids"]) == 5
    expected = choice["logprobs"]["token_logprobs"][-5:]
    assert item["generation_log_probs"] == pytest.approx(expected, abs=1e-5)
