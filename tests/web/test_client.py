"""Answers of other servers: a compressed one takes no more memory and time than its limit."""

from __future__ import annotations

import asyncio
import gzip
from functools import partial

import httpx2
import pytest
from rewards.fake_http import Answer, serve

from ratchet.web.client import AnswerTooLong, NoAnswer, send_request

ZEROS = b"\0" * 100_000
# Without the time in the header, which would make names of tests that differ between workers.
compress = partial(gzip.compress, mtime=0)


def ask(body, encoding):
    answer = Answer(body, headers={"content-encoding": encoding})

    async def send(url):
        async with httpx2.AsyncClient(trust_env=False, verify=False) as client:
            return await send_request(client, "POST", url, timeout_s=10, max_bytes=1000)

    with serve(lambda *_: answer) as fake:
        content = asyncio.run(send(fake.url)).content
        assert fake.seen[0][1]["accept-encoding"] == "gzip"
        return content


def test_a_compressed_answer_is_read():
    assert ask(compress(b"{}"), "gzip") == ask(b"{}", "identity") == b"{}"
    assert ask(b"", "gzip") == b""


@pytest.mark.parametrize(
    ("body", "encoding", "error", "reason"),
    [
        # Unpacked by httpx2, such a body grows a thousandfold per level without any content.
        (compress(compress(b"{}") + ZEROS), "gzip, gzip", NoAnswer, "only gzip"),
        (b"{}", "br", NoAnswer, "only gzip was accepted"),
        (compress(ZEROS), "gzip", AnswerTooLong, "more than 1000 bytes"),
        (compress(b"{}") + ZEROS, "gzip", AnswerTooLong, "more than 1000 bytes"),
        (compress(b"{}") + b"{}", "gzip", NoAnswer, "goes on after its end"),
        (compress(b"{}")[:-1], "gzip", NoAnswer, "breaks off"),
        (b"{}", "gzip", NoAnswer, "is damaged"),
    ],
)
def test_an_answer_that_can_not_be_unpacked_within_its_limit_is_none(body, encoding, error, reason):
    with pytest.raises(error, match=reason):
        ask(body, encoding)
