"""Run `ratchet serve`: serve a trained model through the OpenAI chat API."""

from __future__ import annotations

import asyncio
import hmac
import secrets
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ratchet.commands.model_target import open_target
from ratchet.errors import ConfigError
from ratchet.executors.signals import STOP_SIGNALS
from ratchet.experience.openai_proxy.schema import ChatRequest, apply_sampling
from ratchet.experience.openai_proxy.server import make_chat_app
from ratchet.experience.openai_proxy.session import AgentAnswer, AgentSession
from ratchet.training.stage import Policy
from ratchet.types import Sampling
from ratchet.web.guard import LOOPBACK
from ratchet.web.server import Server

# Sampling parameters that a client may set here, but an agent in a training run may not.
CLIENT_PARAMETERS = ("temperature", "top_p")


@dataclass(frozen=True)
class ServedModel:
    """A model that answers each request independently.

    Attributes:
        policy: The model, its tokenizer and its generator.
        sampling: The defaults for requests. A request without a seed gets a random one.
    """

    policy: Policy
    sampling: Sampling

    async def answer(self, request: ChatRequest) -> AgentAnswer:
        """Answer a request. Raises ApiError."""
        parameters: dict[str, Any] = {
            name: value
            for name in CLIENT_PARAMETERS
            if (value := getattr(request, name)) is not None
        }
        seed = secrets.randbits(32) if request.seed is None else request.seed
        sampling = self.policy.with_stop_ids(apply_sampling(self.sampling, seed=seed, **parameters))
        session = AgentSession(
            self.policy.generator,
            self.policy.renderer,
            sampling,
            max_context=self.policy.model.max_positions,
            max_turns=1,
        )
        return await session.answer(request.model_copy(update=dict.fromkeys(CLIENT_PARAMETERS)))

    def deliver(self, answer: AgentAnswer) -> None:
        """Do nothing: answers are not kept."""


def serve(
    target: Path,
    *,
    host: str,
    port: int,
    key: str,
    sampling: Sampling,
    say: Callable[[str], None] = lambda _: None,
) -> None:
    """Serve until SIGINT, SIGTERM or, unless it is ignored, SIGHUP.

    Raises ConfigError if the address can't be used, or if other machines could reach it without a
    key.

    Args:
        key: The API key that requests must send; "" for none.
        say: A function that gets the address once the model is loaded. For `port=0` the address has
            the port that was chosen.
    """
    if host not in LOOPBACK and not key:
        raise ConfigError(
            f"--host {host} can be reached from other machines: give --api-key too, or leave "
            "--host at 127.0.0.1"
        )
    try:
        listener = socket.create_server(
            (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET
        )
    except OSError as error:
        raise ConfigError(
            f"--port {port} on {host} can't be used: {error.strerror or error}; choose another"
        ) from error
    asyncio.run(_serve(target, listener, key, sampling, say))


async def _serve(
    target: Path,
    listener: socket.socket,
    key: str,
    sampling: Sampling,
    say: Callable[[str], None] = lambda _: None,
) -> None:
    # The target is opened inside the event loop, because a generator may keep tasks there.
    policy = open_target(target).policy
    model = ServedModel(policy, sampling)
    hosts = None if key else tuple(dict.fromkeys((*LOOPBACK, listener.getsockname()[0])))
    app = make_chat_app(
        lambda request_key: (
            model if not key or hmac.compare_digest(request_key.encode(), key.encode()) else None
        ),
        hosts=hosts,
    )
    server, received_signals = Server(app, listener, access_log=True), list[int]()

    def stop(signal_number: int) -> None:
        received_signals.append(signal_number)
        server.stop()

    for signal_number in STOP_SIGNALS:
        # Under `nohup`, SIGHUP is ignored so that the server outlives its terminal. No handler may
        # replace that.
        if (
            signal_number is not signal.SIGHUP
            or signal.getsignal(signal_number) is not signal.SIG_IGN
        ):
            asyncio.get_running_loop().add_signal_handler(signal_number, stop, signal_number)
    host, port = server.address
    say(f"http://{f'[{host}]' if ':' in host else host}:{port}/v1 serves {target} (Ctrl-C ends it)")
    try:
        await server.run()
    finally:
        await policy.close()
    if received_signals:
        raise SystemExit(128 + received_signals[0])
