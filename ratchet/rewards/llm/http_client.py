"""A client that posts JSON over HTTP, with retries, a rate limit and bounded concurrency."""

from __future__ import annotations

import asyncio
import json
import re
import time
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, Field

from ratchet.config.base import Section
from ratchet.errors import RatchetError, link_symptom
from ratchet.utils.credentials import get_credential
from ratchet.utils.retry import get_retry_wait_s
from ratchet.utils.safe_read import parse_json
from ratchet.web.client import NoAnswer, send_request


def _check_url(url: str) -> str:
    if not re.fullmatch(r"https?://[^\s/]+\S*", url):
        raise ValueError(f"{url!r} is not an address: it must begin with http:// or https://")
    return url


Url = Annotated[str, AfterValidator(_check_url)]


class EndpointConfig(Section):
    """The keys that all rewards over HTTP share."""

    calls_model: ClassVar[bool] = True
    """True, as in every reward that calls a service or loads a model."""

    api_key_env: str | None = Field(None, pattern=r"^[A-Za-z_]\w*$")
    """Environment variable that holds the API key; null: no key is sent."""
    timeout_s: float = Field(60.0, gt=0)
    """Timeout of one try, in seconds."""
    retries: int = Field(5, ge=0)
    """Number of further tries after status 408, 425, 429 or 5xx, a timeout, or a broken
    connection."""
    backoff_s: float = Field(1.0, gt=0)
    """Wait before the first retry, in seconds; it doubles with each retry, up to 60 s, and up to
    half is added at random."""
    concurrency: int = Field(16, gt=0)
    """Maximum number of requests in flight."""
    requests_per_minute: float | None = Field(None, gt=0)
    """Maximum rate of requests, which are spaced evenly; null: no limit."""


# HTTP statuses that are retried, besides all of 500 and above.
RETRIED_STATUSES = (408, 425, 429)
MAX_WAIT_S = 60.0
EXCERPT_CHARS = 200


class EndpointError(RatchetError):
    """An error of an endpoint that refused the request, or gave no usable response in any try.

    Attributes:
        status: The HTTP status of the refusal; None if all tries failed.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class RateLimit:
    """A rate limit that spaces requests evenly.

    Many servers would refuse a burst at the start of each minute.
    """

    def __init__(self, per_minute: float | None) -> None:
        self.interval_s = 60.0 / per_minute if per_minute else 0.0
        self._next_start_s = 0.0

    def reserve_start(self, now: float) -> float:
        """Reserve the next start and return the seconds from `now` until then."""
        start = max(now, self._next_start_s)
        self._next_start_s = start + self.interval_s
        return start - now


class _RetryableError(Exception):
    """A failure worth a retry.

    Attributes:
        after_s: The server's Retry-After, in seconds.
    """

    def __init__(self, reason: str, after_s: float = 0.0) -> None:
        super().__init__(reason)
        self.after_s = after_s


class Endpoint:
    """A client of one URL.

    Each request opens its own connection, because a reward outlives the event loops that call it.
    Connecting takes far less time than a request.
    """

    def __init__(self, url: str, config: EndpointConfig) -> None:
        """Raise ConfigError if the key's environment variable is not set."""
        import httpx2

        self._httpx2 = httpx2
        self.url = url
        self.config = config
        self._headers = {"content-type": "application/json"}
        if config.api_key_env is not None:
            self._headers["authorization"] = f"Bearer {get_credential(config.api_key_env)}"
        # Reading the certificates takes 20 ms, so it is done once.
        self._verify = httpx2.create_ssl_context() if url.startswith("https") else False
        self._rate_limit = RateLimit(config.requests_per_minute)
        self._semaphore: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None

    async def post(self, body: Any) -> Any:
        """Post `body` as JSON and return the JSON response. Raises EndpointError."""
        content = json.dumps(body, ensure_ascii=True).encode("ascii")
        n_tries = self.config.retries + 1
        wait_s, reason = 0.0, ""
        for try_index in range(n_tries):
            await asyncio.sleep(wait_s)
            try:
                return await self._try_post(content)
            except _RetryableError as failure:
                wait_s = get_retry_wait_s(
                    try_index,
                    self.config.backoff_s,
                    at_least_s=failure.after_s,
                    max_s=MAX_WAIT_S,
                )
                reason = str(failure)
        raise EndpointError(
            f"{self.url} gave no usable response in {n_tries} tries; the last failed with "
            f"{reason}. {link_symptom('a-judge-fails')}"
        )

    async def _try_post(self, content: bytes) -> Any:
        async with self._get_semaphore():
            await asyncio.sleep(self._rate_limit.reserve_start(time.monotonic()))
            timeout_s = self.config.timeout_s
            try:
                async with self._make_client() as client:
                    response = await send_request(
                        client, "POST", self.url, content=content, timeout_s=timeout_s
                    )
            except TimeoutError:
                raise _RetryableError(f"no answer within {timeout_s:g} s") from None
            except NoAnswer as error:
                raise _RetryableError(str(error)) from None
        status = response.status
        if status in RETRIED_STATUSES or status >= 500:
            raise _RetryableError(
                f"status {status}: {response.text[:EXCERPT_CHARS]}",
                _parse_retry_after(response.headers.get("retry-after")),
            )
        if status != 200:
            raise EndpointError(
                f"{self.url} refused with status {status}: {response.text[:EXCERPT_CHARS]}. "
                f"{link_symptom('a-judge-fails')}",
                status,
            )
        try:
            return parse_json(response.content)
        except ValueError:  # a proxy's error page, or a truncated response
            raise _RetryableError(f"no JSON: {response.text[:EXCERPT_CHARS]!r}") from None

    def _make_client(self) -> Any:
        return self._httpx2.AsyncClient(verify=self._verify, timeout=None, headers=self._headers)

    def _get_semaphore(self) -> asyncio.Semaphore:
        """Return the running event loop's semaphore; a semaphore can't be shared between loops."""
        loop = asyncio.get_running_loop()
        if self._semaphore is None or self._semaphore[0] is not loop:
            self._semaphore = (loop, asyncio.Semaphore(self.config.concurrency))
        return self._semaphore[1]


def _parse_retry_after(header: str | None) -> float:
    """Return the seconds of a Retry-After header; 0 if it is absent or a date."""
    try:
        return max(0.0, float(header or 0.0))
    except ValueError:
        return 0.0
