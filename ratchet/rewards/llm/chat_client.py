"""LLM-as-a-judge: query a judge model, with a cache of its replies.

The model is one of the recipe's `judges`, or is at an OpenAI-compatible endpoint.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import re
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, Protocol

from pydantic import Field, field_validator

from ratchet.config.experience import Temperature
from ratchet.config.sections import JudgedSection
from ratchet.errors import ConfigError, DataError
from ratchet.rewards.base import answer_text
from ratchet.rewards.llm.http_client import Endpoint, EndpointConfig, Url
from ratchet.types import Task, Trajectory
from ratchet.utils.safe_read import read_json

log = logging.getLogger(__name__)


class ChatJudgeConfig(JudgedSection, EndpointConfig):
    """The keys that both kinds of judge share."""

    placeholders: ClassVar[tuple[str, ...]] = ()

    url: Url | None = None
    """Base address of an OpenAI-compatible API, such as http://localhost:8000/v1; null: judge names
    the model."""
    model: str | None = Field(None, min_length=1)
    """Name of the model at the endpoint; null: none."""
    rubric: str = "Is the response correct, complete and clear?"
    """Criteria by which the judge scores or compares."""
    temperature: Temperature = 0.0
    """Sampling temperature of the judge. Even above 0, equal questions share one reply."""
    max_tokens: int = Field(512, gt=0)
    """Maximum number of tokens of the judge's reply."""
    extra_body: dict[str, Any] = Field({})
    """Further keys of a request, such as {reasoning_effort: low}."""
    max_chars: int = Field(20_000, gt=1)
    """Maximum number of characters of an answer; the middle of a longer answer is cut out."""
    cache: Path | None = None
    """Directory that keeps the replies after the run; null: they are kept in memory only."""

    @field_validator("prompt", check_fields=False)
    @classmethod
    def _check_placeholders(cls, prompt: str | None) -> str | None:
        for placeholder in cls.placeholders:
            if prompt is not None and placeholder not in prompt:
                raise ValueError(f"prompt lacks {placeholder}: the judge would not see it")
        return prompt

    def check_keys(self) -> None:
        if self.judge is None:
            missing = [key for key in ("url", "model") if getattr(self, key) is None]
            if missing:
                raise ValueError(
                    f"lacks {' and '.join(missing)}: set judge to a model of the recipe's judges, "
                    "or url and model to one at an endpoint"
                )
            return
        keys = (*EndpointConfig.model_fields, "url", "model", "extra_body", "cache")
        unread = [key for key in keys if key in self.changed]
        if unread:
            raise ValueError(
                f"{unread[0]} is for a model at an endpoint, and judge={self.judge} is one of the "
                f"run: remove {unread[0]}, or judge"
            )


# Values of `finish_reason` of a reply that is not whole, in OpenAI's API and servers like it.
UNFINISHED = ("length", "max_tokens", "content_filter", "error", "abort")
MAX_CACHED_REPLIES = 100_000  # maximum number of replies kept in memory


class ReplyCache:
    """A cache of replies by the hash of the request, in memory and optionally on disk.

    A file that can't be read counts as absent. If a reply can't be written, it stays in memory,
    because the verdict is valid without its file. The first such error is logged.
    """

    def __init__(self, directory: Path | None) -> None:
        self.directory = directory
        self._cached: OrderedDict[str, str] = OrderedDict()
        self._has_warned = False

    def get(self, key: str) -> str | None:
        if key in self._cached:
            self._cached.move_to_end(key)
            return self._cached[key]
        if self.directory is None:
            return None
        try:
            content = read_json(self._path(key))
        except FileNotFoundError:
            return None
        except OSError as error:
            self._warn(error)
            return None
        except ValueError:  # a damaged file
            return None
        reply = content.get("reply") if isinstance(content, dict) else None
        return reply if isinstance(reply, str) else None

    def put(self, key: str, reply: str) -> None:
        self._cached[key] = reply
        if len(self._cached) > MAX_CACHED_REPLIES:
            self._cached.popitem(last=False)
        if self.directory is not None:
            try:
                self._write(self._path(key), json.dumps({"reply": reply}))
            except OSError as error:
                self._warn(error)

    def _write(self, path: Path, content: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft, draft_path = tempfile.mkstemp(dir=path.parent)
        try:
            with open(draft, "w", encoding="utf-8") as file:
                file.write(content)
            os.replace(draft_path, path)  # atomic: another run may write the same file
        except BaseException:
            with suppress(OSError):
                os.unlink(draft_path)
            raise

    def _warn(self, error: OSError) -> None:
        if not self._has_warned:
            self._has_warned = True
            log.warning(
                "cache=%s can't be used (%s), so its questions are asked again and replies are "
                "kept in memory only. Repair the directory or make room",
                self.directory,
                error,
            )

    def _path(self, key: str) -> Path:
        # JSON shows where a reply was cut off: "Score: 1" may be a part of "Score: 10".
        assert self.directory is not None
        return self.directory / key[:2] / f"{key}.json"


class Judge(Protocol):
    """A model of the run that answers questions (`LanguageModelJudge`)."""

    async def reply(self, question: str, *, temperature: float, max_tokens: int) -> str: ...


class ChatJudge:
    """A client of a judge model. Equal questions share one request, even while it is in flight."""

    def __init__(self, config: ChatJudgeConfig) -> None:
        """Raise ConfigError if the key's environment variable is not set."""
        self.config = config
        self._endpoint = None
        if config.url is not None:
            self._endpoint = Endpoint(f"{config.url.rstrip('/')}/chat/completions", config)
        self._judge: Judge | None = None
        self._replies = ReplyCache(config.cache)
        self._pending: dict[str, asyncio.Future[float]] = {}

    def use_judges(self, judges: Mapping[str, Any]) -> None:
        """Take the model that the config names from the models of the run."""
        if self.config.judge is not None:
            self._judge = find_judge(judges, self.config.judge)

    async def query(self, question: str, parse: Callable[[str], float]) -> float:
        """Return the verdict that `parse` reads out of the model's reply.

        Only replies with a verdict are cached, so that the question is put again when an attempt
        is repeated or the run is resumed.

        Raises EndpointError, DataError if there is no whole reply, the errors of `parse`, or those
        of the model's generator.
        """
        config = self.config
        body = {
            "model": config.judge or config.model,
            "messages": [{"role": "user", "content": question}],
            "temperature": config.temperature,
            "max_tokens": config.max_tokens,
            **config.extra_body,
        }
        place = None if self._endpoint is None else self._endpoint.url
        key = hashlib.sha256(json.dumps([place, body], sort_keys=True).encode()).hexdigest()
        cached = self._replies.get(key)
        if cached is not None:
            with suppress(DataError):  # an earlier version may have read a verdict there
                return parse(cached)
        pending = self._pending.get(key)
        if pending is None or pending.get_loop() is not asyncio.get_running_loop():
            verdict = self._fetch_verdict(key, question, body, parse)
            pending = self._pending[key] = asyncio.ensure_future(verdict)
            pending.add_done_callback(lambda _: self._pending.pop(key, None))
        # Shielded, so that a cancelled caller does not cancel the request for the other callers.
        return await asyncio.shield(pending)

    async def _fetch_verdict(
        self, key: str, question: str, body: Mapping[str, object], parse: Callable[[str], float]
    ) -> float:
        reply = await self._fetch(question, body)
        verdict = parse(reply)
        self._replies.put(key, reply)
        return verdict

    async def _fetch(self, question: str, body: Mapping[str, object]) -> str:
        config = self.config
        if self._endpoint is None:
            if self._judge is None:
                raise make_missing_judge_error(config.judge)
            return await self._judge.reply(
                question, temperature=config.temperature, max_tokens=config.max_tokens
            )
        answer = await self._endpoint.post(body)
        try:
            choice = answer["choices"][0]
            reply, finish_reason = choice["message"]["content"], choice.get("finish_reason")
        except (AttributeError, LookupError, TypeError):
            reply, finish_reason = None, None
        # The verdict may be what is missing, or a part of it: "Score: 1" of "Score: 10".
        if finish_reason in UNFINISHED:
            raise DataError(
                f"{self._endpoint.url} did not finish its reply (finish_reason={finish_reason}): "
                f"{str(reply)[-300:]!r}. Raise max_tokens if it was cut off"
            )
        if not isinstance(reply, str) or not reply.strip():
            raise DataError(
                f"{self._endpoint.url} answered without a message: {json.dumps(answer)[:300]}"
            )
        return reply


def find_judge(judges: Mapping[str, Any], name: str) -> Any:
    """Return the model of the run with this name. Raises ConfigError if it is not running."""
    if name not in judges:
        raise make_missing_judge_error(name)
    return judges[name]


def make_missing_judge_error(name: str | None) -> ConfigError:
    """Return the error of a reward that is asked before it has its judge."""
    return ConfigError(
        f"judge={name} names a model of a recipe's judges, and it is not running here. Train or "
        "evaluate with the recipe, or name a model elsewhere by url and model"
    )


def fill_template(template: str, values: Mapping[str, str]) -> str:
    """Return the template with each {name} replaced by its value. A {name} in a value stays."""
    names = "|".join(re.escape(name) for name in values)
    return re.sub(rf"\{{({names})\}}", lambda match: values[match[1]], template)


def format_request(task: Task, trajectory: Trajectory) -> str:
    """Return the messages before the judged answer as text.

    A single message is returned as it is. With several messages, each has its role as a heading.
    """
    messages = trajectory.messages
    answer_index = max(
        (i for i, message in enumerate(messages) if message.role == "assistant"),
        default=len(messages),
    )
    request_messages = messages[:answer_index] or task.messages
    if len(request_messages) == 1:
        return request_messages[0].text
    return "\n\n".join(f"[{message.role}]\n{message.text}" for message in request_messages)


def format_reference(task: Task) -> str:
    return "" if task.answer is None else f"<reference>\n{task.answer}\n</reference>\n"


def shorten_answer(trajectory: Trajectory, max_chars: int) -> str:
    """Return the text of the answer, without its middle if it exceeds `max_chars`."""
    text = answer_text(trajectory)
    half = max_chars // 2
    return text if len(text) <= max_chars else f"{text[:half]}\n[...]\n{text[-half:]}"
