"""Serves NeMo Gym's model server over an endpoint. It runs in the environment of NeMo Gym:
`serve_gym_model.py URL PORT`."""

import sys
from unittest.mock import MagicMock

import uvicorn
from nemo_gym.server_utils import (
    GlobalAIOHTTPAsyncClientConfig,
    ServerClient,
    set_global_aiohttp_client,
)
from responses_api_models.vllm_model.app import VLLMModel, VLLMModelConfig

url, port = sys.argv[1:]
config = VLLMModelConfig(
    host="127.0.0.1",
    port=int(port),
    entrypoint="app.py",
    name="policy",
    base_url=url,
    api_key="none",
    model="policy",
    return_token_id_information=True,
    uses_reasoning_parser=False,
)
app = VLLMModel(config=config, server_client=MagicMock(spec=ServerClient)).setup_webserver()


def open_connections() -> None:
    """Stands for NeMo Gym's global configuration, which `ng_run` makes."""
    set_global_aiohttp_client(GlobalAIOHTTPAsyncClientConfig())


app.router.on_startup.append(open_connections)
uvicorn.run(app, host="127.0.0.1", port=int(port), log_level="warning")
