"""Send one HTTP request with a deadline for the whole answer and a limit of its size.

The timeouts of httpx2 restart with each packet, so a server that sends a byte now and then would
hold the caller forever.

The body is unpacked here, too: a body that httpx2 unpacks may grow without yielding anything that
could be counted, such as one that was compressed several times.
"""

from __future__ import annotations

import asyncio
import zlib
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
    """A whole answer, decompressed."""

    status: int
    headers: Mapping[str, str]
    """Headers by name in lower case."""
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
        max_bytes: Maximum size of the answer, as sent and decompressed.

    Raises:
        TimeoutError: There is no whole answer in time.
        AnswerTooLong: The answer exceeds `max_bytes`.
        NoAnswer: The request can't be sent, or the answer breaks off or can't be decoded.
    """
    import httpx2

    data = bytearray()
    sent_headers = {"accept-encoding": "gzip", **(headers or {})}
    try:
        async with (
            asyncio.timeout(timeout_s),
            client.stream(method, url, content=content, headers=sent_headers) as response,
        ):
            async for chunk in response.aiter_raw():
                data += chunk
                _check_length(data, max_bytes)
    except httpx2.TimeoutException as error:
        raise TimeoutError(str(error)) from error
    except TimeoutError:  # an OSError too, which is no failure of the connection here
        raise
    # UnicodeEncodeError: a header, such as an id that the server gave, is not ASCII.
    except (httpx2.HTTPError, httpx2.InvalidURL, OSError, UnicodeEncodeError) as error:
        raise NoAnswer(f"no answer: {error!r}") from error
    answer_headers = {name.lower(): value for name, value in response.headers.items()}
    encoding = answer_headers.get("content-encoding", "identity").strip().lower()
    body = bytes(data) if encoding == "identity" else _unpack(bytes(data), encoding, max_bytes)
    return WholeAnswer(response.status_code, answer_headers, body)


def _unpack(data: bytes, encoding: str, max_bytes: int) -> bytes:
    """Return the content of a gzip body. Raises NoAnswer if it is damaged or encoded otherwise."""
    if encoding not in ("gzip", "x-gzip"):
        raise NoAnswer(f"an answer in the encoding '{encoding:.80}', and only gzip was accepted")
    decompressor = zlib.decompressobj(zlib.MAX_WBITS | 16)
    try:
        content = decompressor.decompress(data, max_bytes + 1)
    except zlib.error as error:
        raise NoAnswer(f"no answer: its gzip body is damaged ({error})") from error
    _check_length(content, max_bytes)
    if data and (not decompressor.eof or decompressor.unused_data):
        raise NoAnswer("no answer: its gzip body breaks off, or goes on after its end")
    return content


def _check_length(data: bytes | bytearray, max_bytes: int) -> None:
    if len(data) > max_bytes:
        raise AnswerTooLong(f"an answer of more than {max_bytes} bytes")
