"""Requests of one attempt to an environment's HTTP server.

Every fault of the server raises `ServerFault`, which fails the attempt: no connection, a connection
that breaks off, no answer in time, an answer that is too long or malformed.
"""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from ratchet.errors import RatchetError
from ratchet.types import is_number_not_bool
from ratchet.utils.safe_read import parse_json
from ratchet.web.client import NoAnswer, WholeAnswer, send_request

SHOWN_CHARACTERS = 300  # of an answer, in an error

ServerUrl = Annotated[str, Field(pattern=r"^https?://[^\s/]+\S*$")]


class ServerFault(RatchetError):
    """The server failed, or broke its protocol. The attempt fails."""


@dataclass(frozen=True)
class HTTPAnswer(WholeAnswer):
    """An answer of the server. url: address of the request."""

    url: str

    @property
    def is_success(self) -> bool:
        return 200 <= self.status < 300

    def require_success(self) -> HTTPAnswer:
        """Return the answer. Raises ServerFault unless its status is 2xx."""
        if not self.is_success:
            raise ServerFault(f"{self.url} answered {self.status}: {self.text[:SHOWN_CHARACTERS]}")
        return self

    def read_json(self) -> Any:
        """Return the JSON in the answer. Raises ServerFault for an error, or other text."""
        try:
            return parse_json(self.require_success().content)
        except ValueError:
            raise self.make_fault("no JSON") from None

    def read_object(self) -> dict[str, Any]:
        """Return the JSON object in the answer. Raises ServerFault for anything else."""
        values = self.read_json()
        if not isinstance(values, dict):
            raise self.make_fault("no JSON object")
        return values

    def make_fault(self, problem: str) -> ServerFault:
        """Return the error of an answer that is `problem`."""
        return ServerFault(
            f"{self.url} answered {self.text[:SHOWN_CHARACTERS]!r}, which is {problem}"
        )


class HTTPSession:
    """A client of one server that keeps its cookies and headers between requests.

    It is made and used in one event loop.

    Args:
        url: Address of the server.
        timeout_s: Time limit of one answer, in wall-clock seconds.

    Attributes:
        headers: Headers of every further request.
    """

    def __init__(self, url: str, timeout_s: float) -> None:
        import httpx2

        self.url, self.timeout_s = url.rstrip("/"), timeout_s
        self.headers: dict[str, str] = {}
        self._loop = asyncio.get_running_loop()
        # Reading the certificates takes 20 ms, which plain HTTP doesn't need.
        verify = httpx2.create_ssl_context() if url.startswith("https") else False
        self._client = httpx2.AsyncClient(timeout=timeout_s, trust_env=False, verify=verify)

    async def get(self, path: str) -> HTTPAnswer:
        """Return the answer to a GET. Raises ServerFault if there is none."""
        return await self._request("GET", path, None)

    async def post(self, path: str, body: Any = None) -> HTTPAnswer:
        """Return the answer to a POST of a JSON body. Raises ServerFault if there is none."""
        return await self._request("POST", path, {} if body is None else body)

    @property
    def is_alive(self) -> bool:
        """False once the event loop of the connections has ended, and they with it."""
        return self._loop is asyncio.get_running_loop()

    async def close(self) -> None:
        """Close the connections. Further calls do nothing."""
        if self.is_alive:
            await self._client.aclose()

    async def _request(self, method: str, path: str, body: Any) -> HTTPAnswer:
        url = f"{self.url}{path}"
        # ASCII, because text of the policy may hold lone surrogates, which UTF-8 can't encode.
        content = None if body is None else json.dumps(body, allow_nan=False).encode("ascii")
        headers = dict(self.headers)
        if content is not None:
            headers["content-type"] = "application/json"
        try:
            answer = await send_request(
                self._client,
                method,
                url,
                content=content,
                headers=headers,
                timeout_s=self.timeout_s,
            )
        except TimeoutError:
            raise ServerFault(f"{url} did not answer within {self.timeout_s:g} s") from None
        except NoAnswer as error:
            raise ServerFault(f"{url} gave {error}") from error
        return HTTPAnswer(answer.status, answer.headers, answer.content, url)


def ask_server(url: str, body: Any, timeout_s: float) -> Any:
    """Return the JSON answer to a POST of `body`, or to a GET if it is None.

    It blocks until the answer is there. Raises ServerFault.
    """

    async def ask() -> HTTPAnswer:
        session = HTTPSession(url, timeout_s)
        try:
            return await (session.get("") if body is None else session.post("", body))
        finally:
            await session.close()

    # `asyncio.run` needs a thread of its own, because the caller may be in an event loop.
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(asyncio.run, ask()).result().read_json()


def read_reward(reward: Any, url: str) -> float:
    """Return a server's reward. Raises ServerFault unless it is a finite number."""
    if not is_number_not_bool(reward):
        raise ServerFault(f"the reward of {url} is {reward!r:.80}, but must be a finite number")
    return float(reward)
