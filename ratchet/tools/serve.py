"""`ratchet serve`: a trained model behind the OpenAI chat API."""

from __future__ import annotations

import asyncio
import hmac
import secrets
import signal
import socket
from dataclasses import dataclass, replace
from pathlib import Path

from ratchet.errors import ConfigError
from ratchet.experience.proxy.server import chat_app
from ratchet.experience.proxy.session import Answer, Session
from ratchet.experience.proxy.wire import ApiError, Request
from ratchet.stage import Policy
from ratchet.tools.target import open_target
from ratchet.types import Sampling
from ratchet.web.guard import LOOPBACK
from ratchet.web.server import Server


@dataclass(frozen=True)
class Served:
    """Answers each request by itself, drawn as it asks. sampling: where it doesn't say; one without a seed gets a new one."""

    policy: Policy
    sampling: Sampling

    async def answer(self, request: Request) -> Answer:
        """Raises ApiError."""
        asked = {name: value for name in ("temperature", "top_p") if (value := getattr(request, name)) is not None}
        if not 0 <= asked.get("temperature", 0.0) <= 2 or not 0 < asked.get("top_p", 1.0) <= 1:
            raise ApiError(400, "temperature is 0 to 2, and top_p above 0 to 1", code="invalid_value")
        seed = secrets.randbits(32) if request.seed is None else request.seed
        sampling = self.policy.ends(replace(self.sampling, seed=seed, **asked))
        session = Session(
            self.policy.generator, self.policy.renderer, sampling, max_context=self.policy.model.max_positions, max_turns=1
        )
        return await session.answer(request.model_copy(update=dict.fromkeys(("temperature", "top_p"))))

    def deliver(self, answer: Answer) -> None:
        """Nothing is kept of it."""


def serve(target: Path, *, host: str, port: int, key: str, sampling: Sampling) -> None:
    """Until it is interrupted. key: that requests must bring; "": none. Raises ConfigError for an address that others reach
    without a key, or that is taken."""
    if host not in LOOPBACK and not key:
        raise ConfigError(f"--host {host} lets others in: give --api-key too, or leave --host at 127.0.0.1")
    try:
        listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise ConfigError(f"--port {port} on {host} can't be used: {error.strerror or error}; choose another") from error
    asyncio.run(_serve(target, listener, key, sampling))


async def _serve(target: Path, listener: socket.socket, key: str, sampling: Sampling) -> None:
    policy = open_target(target).policy  # in the event loop: a generator may keep tasks in it
    served = Served(policy, sampling)
    names = None if key else tuple(dict.fromkeys((*LOOPBACK, listener.getsockname()[0])))
    app = chat_app(lambda given: served if not key or hmac.compare_digest(given.encode(), key.encode()) else None, names=names)
    server, signals = Server(app, listener, access_log=True), list[int]()

    def end(number: int) -> None:
        signals.append(number)
        server.stop()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, end, number)
    try:
        await server.run()
    finally:
        await policy.close()
    if signals:
        raise SystemExit(128 + signals[0])
