"""Send one HTTP request with a deadline for the whole answer and a limit of its size.

The timeouts of httpx2 restart with each packet, so a server that sends a byte now and then would
hold the caller forever.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MAX_ANSWER_BYTES = 64 << 20


class NoAnswer(Exception):
    """The request has no whole answer. The message is a noun phrase: "no answer: ReadError()"."""


class AnswerTooLong(NoAnswer):
    """The answer exceeds the limit of bytes."""


@dataclass(frozen=True)
class WholeAnswer:
    """A whole answer, decompressed.

    Attributes:
        headers: Headers by name in lower case.
    """

    status: int
    headers: Mapping[str, str]
    content: bytes

    @property
    def text(self) -> str:
        return self.content.decode("utf-8", "replace")


async def send_request(
    client: Any,
    method: str,
    url: str,
    *,
    timeout_s: float,
    content: bytes | None = None,
    headers: Mapping[str, str] | None = None,
    max_bytes: int = MAX_ANSWER_BYTES,
) -> WholeAnswer:
    """Return the answer to a request of an `httpx2.AsyncClient`.

    Args:
        timeout_s: Time limit of the whole answer, in wall-clock seconds.
        max_bytes: Maximum size of the decompressed answer.

    Raises:
        TimeoutError: There is no whole answer in time.
        AnswerTooLong: The answer exceeds `max_bytes`.
        NoAnswer: The request can't be sent, or the answer breaks off or can't be decoded.
    """
    import httpx2

    data = bytearray()
    try:
        async with (
            asyncio.timeout(timeout_s),
            client.stream(method, url, content=content, headers=dict(headers or {})) as response,
        ):
            async for chunk in response.aiter_bytes():
                data += chunk
                if len(data) > max_bytes:
                    raise AnswerTooLong(f"an answer of more than {max_bytes} bytes")
    except httpx2.TimeoutException as error:
        raise TimeoutError(str(error)) from error
    except TimeoutError:  # an OSError too, which is no failure of the connection here
        raise
    # UnicodeEncodeError: a header, such as an id that the server gave, is not ASCII.
    except (httpx2.HTTPError, httpx2.InvalidURL, OSError, UnicodeEncodeError) as error:
        raise NoAnswer(f"no answer: {error!r}") from error
    answer_headers = {name.lower(): value for name, value in response.headers.items()}
    return WholeAnswer(response.status_code, answer_headers, bytes(data))
