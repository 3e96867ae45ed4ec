"""Tools of a Model Context Protocol (MCP) server, called through MCP's official client.

See modelcontextprotocol.io. The client runs in a thread with its own event loop. Its connection
belongs to the asyncio task that opened it, but must outlive the episodes and event loops that use
it.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import os
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, ClassVar

from pydantic import Field, ValidationError

from ratchet.environments.tool_use.base import ToolConfig, ToolError, ToolUnavailable
from ratchet.errors import ConfigError, MissingDependency
from ratchet.processes.left_processes import OWNER
from ratchet.types import Part

# Longest wait for the servers' ends when the process exits. The client asks a server to end, and
# kills it 4 s later.
EXIT_S = 8.0
# Message of the client's own error for a connection that is closed. Servers may use its code too.
CLOSED = "Connection closed"


class MCPConfig(ToolConfig):
    """The tools of a Model Context Protocol server that uses standard input and output."""

    builds: ClassVar[str] = "ratchet.environments.tool_use.mcp:mcp_tools"

    command: tuple[str, ...] = Field(min_length=1)
    """Command that starts the server: program and arguments."""
    env: dict[str, str] = Field({})
    """Environment variables of the server, besides a few basic ones."""
    only: tuple[str, ...] = ()
    """Names of the tools to offer; empty: all."""
    images: bool = False
    """true: images in answers reach the policy, whose model must read them; false: each image is
    replaced by the text (image)."""
    start_s: float = Field(30.0, gt=0)
    """Time limit for starting the server and listing its tools, in seconds."""


class MCPServer:
    """A running MCP server. Raises ToolUnavailable at construction if it does not start."""

    def __init__(self, config: MCPConfig) -> None:
        try:
            import mcp  # noqa: F401
        except ImportError:
            raise MissingDependency("mcp", extra="tools", needed_for="tools over MCP") from None
        self.config = config
        self._connection = _Connection(config)
        self._lock = threading.Lock()

    @property
    def tool_descriptions(self) -> Sequence[Any]:
        return self._connection.tool_descriptions

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """Return the result of a tool call, after restarting the server if it has ended.

        Raises ToolUnavailable if it ends during the call, breaks the protocol or has other tools
        since its restart, and ToolError for other MCP errors.
        """
        connection = await asyncio.to_thread(self._get_live_connection)
        return await asyncio.wrap_future(connection.call(name, arguments))

    def _get_live_connection(self) -> _Connection:
        """Return the connection, or a new one if the server has ended."""
        with self._lock:
            if self._connection.has_ended:
                connection = _Connection(self.config)
                if _list_interfaces(connection) != _list_interfaces(self._connection):
                    connection.end()
                    raise ToolUnavailable(
                        f"the MCP server '{' '.join(self.config.command)}' has other tools since "
                        "its restart, and the policy knows the earlier ones. Start the run again"
                    )
                self._connection = connection
            return self._connection


def _list_interfaces(connection: _Connection) -> list[tuple[str, Any]]:
    """Return the names and parameters of a server's tools."""
    return sorted(
        ((tool.name, tool.input_schema) for tool in connection.tool_descriptions),
        key=lambda interface: interface[0],
    )


class _Connection:
    """A server process and the thread of its client."""

    def __init__(self, config: MCPConfig) -> None:
        self.tool_descriptions: Sequence[Any] = ()
        self._state = _State()
        self._thread = threading.Thread(
            target=_serve, args=(config, self._state), name="mcp", daemon=True
        )
        _STATES.add(self._state)
        self._thread.start()
        weakref.finalize(self, self._state.end)
        self._state.ready.wait(config.start_s)
        if self._state.failure or not self._state.ready.is_set():
            self._state.end()
            failure = (
                self._state.failure or f"it did not list its tools within {config.start_s:g} s"
            )
            raise ToolUnavailable(
                f"the MCP server '{' '.join(config.command)}' can't be used: {failure}"
            )
        self.tool_descriptions = self._state.tool_descriptions

    @property
    def has_ended(self) -> bool:
        # The thread may outlive its server.
        return self._state.has_ended or not self._thread.is_alive()

    def end(self) -> None:
        self._state.end()

    def call(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """Call a tool. Return a future of the result."""
        assert self._state.loop is not None
        return asyncio.run_coroutine_threadsafe(self._state.call(name, arguments), self._state.loop)


class _State:
    """The state that a connection shares with its thread.

    It has no reference to the connection, so that an unused connection is garbage-collected.
    """

    def __init__(self) -> None:
        self.ready = threading.Event()
        self.failure = ""  # why the server did not start
        self.tool_descriptions: Sequence[Any] = ()
        self.loop: asyncio.AbstractEventLoop | None = None
        self.client: Any = None
        self.scope: Any = None  # anyio's scope of the connection
        self.must_end = False
        self.has_ended = False  # True once the server has ended
        self.finished = threading.Event()  # set once the thread has closed the connection

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Any:
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED

        try:
            return await self.client.call_tool(name, dict(arguments))
        except MCPError as error:
            if error.code == CONNECTION_CLOSED and str(error) == CLOSED:
                self._mark_ended()
                raise ToolUnavailable(
                    f"the MCP server of tool '{name}' has ended: {error}"
                ) from error
            raise ToolError(str(error)) from error
        except ValidationError as error:
            raise ToolUnavailable(
                f"the MCP server of tool '{name}' answered with no result of a tool: {error}"
            ) from error
        except (OSError, EOFError) as error:
            self._mark_ended()
            raise ToolUnavailable(f"the MCP server of tool '{name}' is gone: {error}") from error

    def _mark_ended(self) -> None:
        self.has_ended = True
        self.end()

    def end(self) -> None:
        """Make the thread close the connection, also while it is being made.

        Any thread may call this.
        """
        self.must_end = True
        if self.loop is not None and self.scope is not None:
            with suppress(RuntimeError):  # the loop has ended already
                self.loop.call_soon_threadsafe(self.scope.cancel)


_STATES: weakref.WeakSet[_State] = weakref.WeakSet()  # of all connections whose threads run


@atexit.register
def _end_all() -> None:
    """End all servers. A daemon thread ends with the process, before it could kill its server."""
    states = list(_STATES)
    for state in states:
        state.end()
    deadline = time.monotonic() + EXIT_S
    for state in states:
        state.finished.wait(max(0.0, deadline - time.monotonic()))


def _serve(config: MCPConfig, state: _State) -> None:
    """Run the connection in this thread until it ends. Record an error in `state.failure`."""
    try:
        asyncio.run(_keep_connection(config, state))
    except Exception as error:  # the constructor of the connection reads `failure`
        while isinstance(error, ExceptionGroup):
            error = error.exceptions[0]
        state.failure = state.failure or f"{type(error).__name__}: {error}"
    finally:
        _STATES.discard(state)
        state.finished.set()
        state.ready.set()


async def _keep_connection(config: MCPConfig, state: _State) -> None:
    """Start the server, list its tools, and keep the connection open until `state.end`."""
    import anyio
    from mcp import Client, StdioServerParameters, stdio_client

    command, *arguments = config.command
    parameters = StdioServerParameters(
        command=command, args=arguments, env={**config.env, OWNER: str(os.getpid())}
    )
    # The client kills its server if the scope is cancelled, at whatever point it is.
    with open(os.devnull, "w", encoding="utf-8") as discarded, anyio.CancelScope() as scope:
        state.loop, state.scope = asyncio.get_running_loop(), scope
        if state.must_end:
            return
        async with Client(stdio_client(parameters, errlog=discarded)) as client:
            state.client = client
            state.tool_descriptions = await _list_tools(client)
            state.ready.set()
            await anyio.sleep_forever()


async def _list_tools(client: Any) -> list[Any]:
    """Return the descriptions of all tools, which a server may list in several pages.

    Raises ToolUnavailable if two of them share a name.
    """
    page = await client.list_tools()
    tools = list(page.tools)
    while page.next_cursor is not None:
        page = await client.list_tools(cursor=page.next_cursor)
        tools += page.tools
    names = [tool.name for tool in tools]
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated is not None:
        raise ToolUnavailable(f"it lists two tools called '{repeated}'")
    return tools


class MCPTool:
    """A tool of an MCP server."""

    def __init__(self, server: MCPServer, description: Any) -> None:
        self.server = server
        self.name = str(description.name)
        self.description = str(description.description or "")
        self.parameters: Mapping[str, Any] = description.input_schema

    async def call(self, **arguments: Any) -> str | list[Part]:
        """Return the result as text, or as parts if it has images that the policy may see.

        Other content is replaced by its type, such as "(audio)". Structured content is read, as
        JSON, if there is no other. Raises ToolError if the server reports a failed call,
        ToolUnavailable if the server is gone.
        """
        result = await self.server.call(self.name, arguments)
        parts = [part.text if part.type == "text" else f"({part.type})" for part in result.content]
        text = "\n".join(parts)
        if not parts and result.structured_content is not None:
            text = json.dumps(result.structured_content, ensure_ascii=False)
        if result.is_error:
            raise ToolError(text)
        if not self.server.config.images or "image" not in {part.type for part in result.content}:
            return text
        return [
            Part("image", f"data:{part.mime_type};base64,{part.data}")
            if part.type == "image"
            else Part("text", text)
            for part, text in zip(result.content, parts, strict=True)
        ]


def mcp_tools(config: MCPConfig) -> list[MCPTool]:
    """Return the tools of a new server. Raises ConfigError for an unknown name in `only`."""
    server = MCPServer(config)
    tools = {tool.name: MCPTool(server, tool) for tool in server.tool_descriptions}
    for name in config.only:
        if name not in tools:
            raise ConfigError(f"the MCP server has no tool '{name}': it has {', '.join(tools)}")
    return [tool for name, tool in tools.items() if not config.only or name in config.only]
