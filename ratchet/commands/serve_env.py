"""Run `ratchet serve-env`: serve an environment by OpenEnv's protocol.

Each connection is a session with an environment of its own. The seed of a reset is the position of
the task in its split. Actions are {"message": text}, or calls of the environment's tools as MCP
environments of OpenEnv take them.

Source: the package openenv 0.10.0, core/env_server/http_server.py (`/ws`) and types.py.
"""

from __future__ import annotations

import asyncio
import copy
import json
import uuid
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any

from ratchet.commands.eval_setup import make_env_section
from ratchet.config.loader import load_config
from ratchet.errors import ConfigError, RatchetError
from ratchet.evals.message_player import AttemptState
from ratchet.executors.event_loop import run_event_loop
from ratchet.executors.signals import STOP_SIGNALS
from ratchet.experience.rollout.environment_answers import (
    close_environment,
    reset_environment,
    step_environment,
)
from ratchet.protocols import Environment, Step
from ratchet.rewards.base import copy_task
from ratchet.training.stage import EnvSetup
from ratchet.training.stage_from_config import build_env_setup, build_eval_env_setup
from ratchet.training.workers.judges import start_judges
from ratchet.types import Message, Scored, Split, Task, ToolCall
from ratchet.utils.user_code import UserCodeFailed, leave_when_cancelled, run_guarded
from ratchet.web.guard import LOOPBACK, explain_refusal
from ratchet.web.websockets import import_websockets

MAX_REQUEST_BYTES = 16 << 20
MAX_LATEST_TASKS = 4096
SPLITS = ("train", "test")
TEXT = {"type": "string"}
MESSAGE = {"type": "object", "properties": {"message": TEXT}, "required": ["message"]}
OBSERVATION = {"type": "object", "properties": {"text": TEXT, "messages": {"type": "array"}}}
STATE = {
    "type": "object",
    "properties": {"episode_id": TEXT, "step_count": {"type": "integer"}, "task_id": TEXT},
}


class RequestError(Exception):
    """A request that can't be answered; `code` is one of OpenEnv's error codes."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class SplitReader:
    """A reader of the test split, which all sessions share.

    Not every test split has direct access: a generated one is made from its beginning, which may
    take long or have no end. A pass reads each task once. Only a task before the latest ones is
    looked for from the beginning.
    """

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self._tasks: Iterator[Task] = iter(())
        self._end = 0  # number of tasks read so far
        self._latest: deque[Task] = deque(maxlen=MAX_LATEST_TASKS)

    async def find(self, index: int) -> Task | None:
        """Return the task at a position; None if the split ends before it."""
        while not self._end - len(self._latest) <= index < self._end:
            if index < self._end or not self._latest:
                self._tasks, self._end = self._environment.tasks("test", seed=0), 0
                self._latest.clear()
            try:
                task = next(self._tasks, None)
            except Exception:
                self._latest.clear()
                raise
            if task is None:
                return None
            self._latest.append(task)
            self._end += 1
            # Other sessions are answered between two tasks, and may read some.
            await asyncio.sleep(0)
        return copy_task(self._latest[index - self._end])


@dataclass
class PlaySession:
    """The state of one connection."""

    setup: EnvSetup
    environment: Environment
    test_tasks: SplitReader
    episode: AttemptState | None = None
    """The current or latest episode; None before the first reset."""
    episode_id: str | None = None
    n_steps: int = 0
    """Number of steps of the episode so far."""
    is_done: bool = True
    """True if a reset must come before the next step."""

    async def answer(self, request: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
        """Return the type and the data of the answer to a request. Raises RequestError."""
        kind, data = request.get("type"), request.get("data") or {}
        if kind == "state":
            task_id = self.episode.task.id if self.episode else None
            state = {"episode_id": self.episode_id, "step_count": self.n_steps, "task_id": task_id}
            return "state", state
        if kind not in ("reset", "step"):
            raise RequestError("UNKNOWN_TYPE", f"type {kind!r}: send reset, step, state or close")
        if not isinstance(data, dict):
            raise RequestError("VALIDATION_ERROR", "data must be an object")
        return "observation", await (self._reset(data) if kind == "reset" else self._step(data))

    async def _reset(self, data: Mapping[str, Any]) -> Mapping[str, Any]:
        """Begin an episode of task number `seed` of the split, and return its observation."""
        seed, split = data.get("seed", 0), data.get("split", "train")
        seed = 0 if seed is None else seed
        if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0 or split not in SPLITS:
            message = f"seed={seed!r} must be 0 or more, split={split!r} must be train or test"
            raise RequestError("VALIDATION_ERROR", message)

        task = await run_guarded(partial(self._find_task, split, seed))
        if task is None:
            raise RequestError("VALIDATION_ERROR", f"the {split} split has no task {seed}")
        messages = await reset_environment(self.environment, task)
        self.episode = AttemptState(task, self.environment, list(messages))
        self.episode_id = str(data.get("episode_id") or uuid.uuid4())
        self.n_steps, self.is_done = 0, False
        return _observe(messages, None, False)

    async def _find_task(self, split: Split, index: int) -> Task | None:
        """Return a task of a split; None if the split ends before it."""
        if split == "test":
            return await self.test_tasks.find(index)
        return next(self.environment.tasks("train", seed=0, start=index), None)

    async def _step(self, data: Mapping[str, Any]) -> Mapping[str, Any]:
        """Take one action in the episode, or list the tools, and return the observation."""
        if data.get("type") == "list_tools":
            return {"observation": {"tools": self._list_tools()}, "reward": None, "done": False}
        if self.episode is None or self.is_done:
            raise RequestError("EXECUTION_ERROR", "there is no episode: reset first")
        message = _read_action(data, self.n_steps)
        self.n_steps += 1
        step = await step_environment(self.environment, message)
        self.episode.messages += [message, *step.messages]
        self.is_done = step.done
        reward = await self._judge(self.episode) if _is_unjudged(step) else step.reward
        if message.tool_calls:
            result = step.messages[-1].text if step.messages else ""
            call = {"tool_name": message.tool_calls[0].name, "result": result, "error": None}
            return {"observation": call, "reward": reward, "done": step.done}
        return _observe(step.messages, reward, step.done)

    def _list_tools(self) -> list[Mapping[str, Any]]:
        if self.episode is None or not self.environment.has_tools:
            return []
        functions = [tool["function"] for tool in self.environment.tools(self.episode.task)]
        return [
            {
                "name": function["name"],
                "description": function.get("description", ""),
                "input_schema": function.get("parameters", {}),
            }
            for function in functions
        ]

    async def _judge(self, episode: AttemptState) -> float | None:
        """Return the reward functions' reward of the episode; None if there are none."""
        reward = self.setup.reward
        if reward is None:
            return None
        trajectory = episode.make_trajectory(0, 1.0, None)
        (outcome,) = await run_guarded(lambda: reward.score([trajectory], episode.task))
        if not isinstance(outcome, Scored):
            raise RequestError("EXECUTION_ERROR", f"the episode can't be judged: {outcome}")
        return outcome.reward


def _is_unjudged(step: Step) -> bool:
    """True if the episode ended, and the environment gave no reward for its last step."""
    return step.done and step.reward is None


def _read_action(data: Mapping[str, Any], index: int) -> Message:
    """Return an action as the policy's message.

    Raises RequestError if it is neither a message nor a call.

    Args:
        index: Number of earlier steps of the episode, which becomes the id of a call.
    """
    if isinstance(data.get("message"), str):
        return Message("assistant", data["message"])
    name, arguments = data.get("tool_name"), data.get("arguments", {})
    is_call = data.get("type") == "call_tool" and isinstance(name, str)
    if not is_call or not isinstance(arguments, dict):
        raise RequestError(
            "VALIDATION_ERROR", "an action has message (a text), or type call_tool and tool_name"
        )
    return Message("assistant", tool_calls=(ToolCall(f"call_{index}", str(name), arguments),))


def _observe(messages: Any, reward: float | None, done: bool) -> Mapping[str, Any]:
    shown = [{"role": message.role, "content": message.text} for message in messages]
    text = shown[-1]["content"] if shown else ""
    return {"observation": {"text": text, "messages": shown}, "reward": reward, "done": done}


class EnvironmentServer:
    """A server of one environment. Each connection plays a copy of it.

    Args:
        setup: The environment and its rewards.
        name: Name of the environment, for /metadata.
        sessions: Maximum number of connections that play at once.
        hosts: Hosts that the Host and Origin headers of a request may name; None: any (see
            `ratchet.web.guard.Guard`).
    """

    def __init__(
        self, setup: EnvSetup, name: str, sessions: int, hosts: Collection[str] | None = None
    ) -> None:
        self._setup = setup
        self._name = name
        self._n_free = sessions
        self._hosts = hosts
        self._test_tasks = SplitReader(setup.environment)

    def answer_http(self, connection: Any, request: Any) -> Any:
        """Return the answer to a plain HTTP request; None for the WebSocket."""
        if self._hosts is not None:
            headers = [
                (name.lower().encode("latin-1", "replace"), value.encode("latin-1", "replace"))
                for name, value in request.headers.raw_items()
            ]
            if reason := explain_refusal(headers, self._hosts):
                return connection.respond(HTTPStatus.FORBIDDEN, f"{reason}\n")
        pages: Mapping[str, Any] = {
            "/health": {"status": "healthy"},
            "/metadata": {"name": self._name, "description": f"Ratchet's {self._name}"},
            "/schema": {"action": MESSAGE, "observation": OBSERVATION, "state": STATE},
        }
        path = request.path.partition("?")[0]
        if path == "/ws":
            return None
        if path not in pages:
            return connection.respond(HTTPStatus.NOT_FOUND, "the WebSocket is /ws\n")
        response = connection.respond(HTTPStatus.OK, json.dumps(pages[path]))
        del response.headers["Content-Type"]
        response.headers["Content-Type"] = "application/json"
        return response

    async def play(self, socket: Any) -> None:
        """Answer the requests of one connection until it closes. Its first begins a session."""
        with suppress(import_websockets("ratchet serve-env").ConnectionClosed):
            text = await socket.recv()
            if self._n_free > 0:
                await self._play_session(socket, text)
                return
            fault = {"message": "all sessions are in use", "code": "CAPACITY_REACHED"}
            await socket.send(json.dumps({"type": "error", "data": fault}))

    async def _play_session(self, socket: Any, text: str | bytes) -> None:
        self._n_free -= 1
        session = PlaySession(self._setup, copy.copy(self._setup.environment), self._test_tasks)
        answering = leave_when_cancelled(_answer_requests(session, socket, text))
        try:
            await _wait_for_end(asyncio.ensure_future(answering), socket)
        finally:
            self._n_free += 1
            await close_environment(session.environment)


async def _wait_for_end(answering: asyncio.Task[None], socket: Any) -> None:
    """Wait until a session has ended. End it if its client leaves while user code waits."""
    leaving = asyncio.ensure_future(socket.wait_closed())
    try:
        await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        leaving.cancel()
        answering.cancel()
        await asyncio.wait({answering})
    if not answering.cancelled():
        answering.result()


async def _answer_requests(session: PlaySession, socket: Any, text: str | bytes) -> None:
    """Answer the request `text` and those that follow, until the connection closes."""
    while (answer := await _answer_text(session, text)) is not None:
        await socket.send(answer)
        text = await socket.recv()


def _read_request(text: str | bytes) -> dict[str, Any]:
    """Return a request. Raises RequestError."""
    try:
        request = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError("INVALID_JSON", f"invalid JSON: {error}") from error
    if not isinstance(request, dict):
        raise RequestError("VALIDATION_ERROR", "a request must be a JSON object")
    return request


async def _answer_text(session: PlaySession, text: str | bytes) -> str | None:
    """Return the answer to a request as JSON; None if the request closes the session."""
    try:
        request = _read_request(text)
        if request.get("type") == "close":
            return None
        kind, data = await session.answer(request)
    except RequestError as error:
        errors = [{"msg": str(error)}] if error.code == "VALIDATION_ERROR" else []
        kind = "error"
        data = {"message": str(error), "code": error.code, "errors": errors}
    except (UserCodeFailed, RatchetError) as error:
        session.is_done = True
        message = str(error).strip().rpartition("\n")[2]
        kind, data = "error", {"message": message, "code": "EXECUTION_ERROR"}
    return json.dumps({"type": kind, "data": data})


def build_served_setup(target: str, overrides: list[str]) -> EnvSetup:
    """Return the environment and rewards to serve. Raises ConfigError.

    Args:
        target: A recipe, of which the last stage is served, or a kind of environment.
        overrides: `key=value` with keys of that kind; a recipe takes none.
    """
    if not target.endswith((".yaml", ".yml")):
        return build_eval_env_setup(make_env_section(target, overrides))
    if overrides:
        raise ConfigError(f"'{overrides[0]}' is for a kind of environment: set it in {target}")
    config = load_config(Path(target))
    return build_env_setup(config.stages[-1], judges=start_judges(config))


def serve_environment(
    target: str,
    overrides: list[str],
    *,
    host: str,
    port: int,
    sessions: int,
    say: Callable[[str], None],
) -> None:
    """Serve an environment until a stop signal. Raises ConfigError or DataError.

    Args:
        target: As for `build_served_setup`.
        overrides: As for `build_served_setup`.
        host: Address to listen on.
        port: Port to listen on; 0 takes a free one.
        sessions: Maximum number of connections that play at once.
        say: Shows the line with the server's address.
    """
    setup = build_served_setup(target, overrides)
    next(setup.environment.tasks("train", seed=0))  # raises now, not later, if there are no tasks
    hosts = LOOPBACK if host in LOOPBACK else None
    run_event_loop(_serve(EnvironmentServer(setup, target, sessions, hosts), host, port, say))


async def _serve(
    server: EnvironmentServer, host: str, port: int, say: Callable[[str], None]
) -> None:
    websockets = import_websockets("ratchet serve-env")
    stop = asyncio.Event()
    for number in STOP_SIGNALS:
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    try:
        listening = await websockets.serve(
            server.play,
            host,
            port,
            process_request=server.answer_http,
            max_size=MAX_REQUEST_BYTES,
        )
    except OSError as error:
        raise ConfigError(f"--host {host} --port {port} can't be listened on: {error}") from error
    async with listening:
        host, port = listening.sockets[0].getsockname()[:2]
        say(f"OpenEnv's protocol on http://{host}:{port} (WebSocket /ws)")
        await stop.wait()
