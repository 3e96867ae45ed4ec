"""One session on an OpenEnv server: a WebSocket on which requests and answers alternate.

Source: the package openenv 0.10.0, core/env_server/http_server.py (`/ws`) and types.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ratchet.environments.servers.http_session import ServerFault, ask_server
from ratchet.errors import DataError, RatchetError
from ratchet.types import is_finite_number
from ratchet.utils.safe_read import parse_json
from ratchet.web.websockets import import_websockets

MAX_ANSWER_BYTES = 64 << 20
NEEDED_FOR = "environment.kind openenv"
FIELD_ERRORS = ("missing", "extra_forbidden")  # pydantic's types of errors
RETRY_S = 0.05  # pause between two attempts to get a session, while the server has none free


class OpenEnvError(RatchetError):
    """The server failed, or broke the protocol. The attempt fails."""


class InvalidAction(OpenEnvError):
    """The server's schema refuses the action, which is the policy's fault.

    Attributes:
        detail: The reason, for the policy.
        lacks_fields: True if the action has other fields than the schema. The policy chooses them
            only for tools.
    """

    def __init__(self, message: str, detail: str, lacks_fields: bool) -> None:
        super().__init__(message)
        self.detail, self.lacks_fields = detail, lacks_fields


class NoSessionFree(OpenEnvError):
    """The server holds as many sessions as it can."""


@dataclass(frozen=True)
class Answer:
    """The server's answer to a reset or a step."""

    observation: Mapping[str, Any]
    reward: float
    """0 if the server gave none. OpenEnv allows booleans: true is 1."""
    done: bool


class OpenEnvSession:
    """A connection with an environment of its own on the server."""

    def __init__(self, socket: Any, url: str, timeout_s: float) -> None:
        self._socket = socket
        self._url = url
        self._timeout_s = timeout_s

    @classmethod
    async def open(cls, url: str, timeout_s: float) -> OpenEnvSession:
        """Connect to the server at `url`. Raises OpenEnvError if that fails."""
        websockets = import_websockets(NEEDED_FOR)
        address = f"ws{url.removeprefix('http').rstrip('/')}/ws"
        try:
            socket = await websockets.connect(
                address, open_timeout=timeout_s, max_size=MAX_ANSWER_BYTES, proxy=None
            )
        except (OSError, TimeoutError, websockets.WebSocketException) as error:
            raise OpenEnvError(f"no OpenEnv server answers at {address}: {error!r}") from error
        return cls(socket, url, timeout_s)

    async def reset(self, seed: int, options: Mapping[str, Any]) -> Answer:
        """Begin an episode. Raises OpenEnvError."""
        return _read_answer(await self._ask("reset", {**options, "seed": seed}))

    async def step(self, action: Mapping[str, Any]) -> Answer:
        """Take an action. Raises OpenEnvError."""
        await self._refuse_surplus()
        return _read_answer(await self._ask("step", action))

    async def close(self) -> None:
        """End the session and its environment."""
        faults = (
            OSError,
            TimeoutError,
            import_websockets(NEEDED_FOR).WebSocketException,
        )
        with contextlib.suppress(*faults):
            async with asyncio.timeout(self._timeout_s):
                await self._socket.send(json.dumps({"type": "close"}))
                await self._socket.close()

    async def finish(self) -> None:
        """End the session after an episode, and check that each answer was that of its request.

        Raises OpenEnvError if the server has sent a further answer: the last one may be an answer
        to an earlier request, which came late.
        """
        await self.close()
        await self._refuse_surplus()

    async def _refuse_surplus(self) -> None:
        """Raise OpenEnvError if the server has sent a message that answers no request.

        Messages have no ids, so it would be taken for the answer to the next request, and each
        further answer, with its reward, for that of the request before it.
        """
        closed = import_websockets(NEEDED_FOR).ConnectionClosed  # `_ask` reports it
        with contextlib.suppress(TimeoutError, closed):
            async with asyncio.timeout(0):
                text = await self._socket.recv()
            raise OpenEnvError(
                f"{self._url} sent a message that answers no request: {text[:200]!r}"
            )

    async def _ask(self, kind: str, data: Mapping[str, Any]) -> Mapping[str, Any]:
        try:
            async with asyncio.timeout(self._timeout_s):
                # A full server sends an error and closes before it reads a request. The request
                # then can't be sent, but the error can still be received.
                with contextlib.suppress(import_websockets(NEEDED_FOR).ConnectionClosed):
                    await self._socket.send(json.dumps({"type": kind, "data": data}))
                text = await self._socket.recv()
        except TimeoutError:
            raise OpenEnvError(
                f"{self._url} did not answer {kind} within {self._timeout_s:g} s"
            ) from None
        except (OSError, import_websockets(NEEDED_FOR).WebSocketException) as error:
            raise OpenEnvError(f"{self._url} broke off during {kind}: {error!r}") from error
        try:
            message = parse_json(text)
            answer_kind, content = message["type"], message["data"]
            content = dict(content)
        except (ValueError, LookupError, TypeError):
            raise OpenEnvError(f"{self._url} answered {kind} with {text[:200]!r}") from None
        if answer_kind == "error":
            raise _make_error(self._url, kind, content)
        if answer_kind != "observation":
            raise OpenEnvError(f"{self._url} answered {kind} with a message '{answer_kind}'")
        return content


def _make_error(url: str, kind: str, content: Mapping[str, Any]) -> OpenEnvError:
    """Return the exception for the server's error `content` in answer to a request of `kind`."""
    code = content.get("code")
    text = f"{url} failed at {kind}: {content.get('message')} ({code})"
    if code == "CAPACITY_REACHED":
        return NoSessionFree(text)
    if code == "VALIDATION_ERROR" and kind == "step":
        listed = content.get("errors")
        errors = [e for e in (listed if isinstance(listed, list) else ()) if isinstance(e, dict)]
        reasons = "; ".join(str(error.get("msg")) for error in errors)[:500]
        lacks_fields = any(
            error.get("type") in FIELD_ERRORS and not _is_inside_field(error.get("loc"))
            for error in errors
        )
        return InvalidAction(text, reasons or "it does not fit the schema", lacks_fields)
    return OpenEnvError(text)


def _is_inside_field(location: object) -> bool:
    """True if an error lies inside the value of a field, which the policy wrote."""
    return isinstance(location, list) and len(location) > 1


async def open_episode(
    url: str, timeout_s: float, seed: int, options: Mapping[str, Any]
) -> tuple[OpenEnvSession, Answer]:
    """Return a new session, and the answer to its reset.

    While the server has no session free, this tries again for up to `timeout_s` seconds. Raises
    OpenEnvError.
    """
    deadline = asyncio.get_running_loop().time() + timeout_s
    while True:
        session = await OpenEnvSession.open(url, timeout_s)
        try:
            return session, await session.reset(seed, options)
        except NoSessionFree as error:
            await session.close()
            if asyncio.get_running_loop().time() > deadline:
                raise OpenEnvError(
                    f"{error}. Set the server's max_concurrent_envs to at least the number of "
                    "attempts that run at once."
                ) from error
            await asyncio.sleep(RETRY_S)
        except BaseException:
            await session.close()
            raise


def _read_answer(content: Mapping[str, Any]) -> Answer:
    observation, reward, done = (content.get(key) for key in ("observation", "reward", "done"))
    if not isinstance(observation, dict) or not isinstance(done, bool):
        raise OpenEnvError(f"the server's answer lacks observation or done: {str(content)[:200]}")
    if reward is not None and not is_finite_number(reward):
        raise OpenEnvError(f"the server's reward is {reward!r}, but must be a finite number")
    return Answer(observation, float(reward or 0.0), done)


def read_schema(url: str, timeout_s: float) -> Mapping[str, Any]:
    """Return the JSON schemas of the server's actions and observations.

    Raises DataError if the server does not answer with a schema of actions.
    """
    address = f"{url.rstrip('/')}/schema"
    try:
        schema = ask_server(address, None, timeout_s)
    except ServerFault as error:
        raise DataError(f"no OpenEnv server answers at {address}: {error}") from error
    action = schema.get("action", {}) if isinstance(schema, Mapping) else None
    if (
        not isinstance(action, Mapping)
        or not isinstance(action.get("properties", {}), Mapping)
        or not isinstance(required := action.get("required", []), list)
        or not all(isinstance(name, str) for name in required)
    ):
        raise DataError(
            f"{address} answered {json.dumps(schema)[:200]}, which is no schema of actions: name "
            "the address of an OpenEnv server"
        )
    return schema
