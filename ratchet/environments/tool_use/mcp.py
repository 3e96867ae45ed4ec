"""Tools of a Model Context Protocol (MCP) server, called through MCP's official client.

See modelcontextprotocol.io. The client runs in a thread with its own event loop. Its connection
belongs to the asyncio task that opened it, but must outlive the episodes and event loops that use
it.
"""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import Field

from ratchet.environments.tool_use.base import ToolConfig, ToolError, ToolUnavailable
from ratchet.errors import ConfigError, MissingDependency
from ratchet.types import Part


class MCPConfig(ToolConfig):
    """The tools of a Model Context Protocol server that uses standard input and output."""

    builds: ClassVar[str] = "ratchet.environments.tool_use.mcp:mcp_tools"

    command: tuple[str, ...] = Field(
        min_length=1, description="Command that starts the server: program and arguments."
    )
    env: dict[str, str] = Field(
        {}, description="Environment variables of the server, besides a few basic ones."
    )
    only: tuple[str, ...] = Field((), description="Names of the tools to offer; empty: all.")
    images: bool = Field(
        False,
        description="true: images in answers reach the policy, whose model must read them; false: "
        "each image is replaced by the text (image).",
    )
    start_s: float = Field(
        30.0,
        gt=0,
        description="Time limit for starting the server and listing its tools, in seconds.",
    )


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

        Raises ToolUnavailable if it ends during the call, and ToolError for other MCP errors.
        """
        connection = await asyncio.to_thread(self._get_live_connection)
        return await asyncio.wrap_future(connection.call(name, arguments))

    def _get_live_connection(self) -> _Connection:
        """Return the connection, or a new one if the server has ended."""
        with self._lock:
            if self._connection.has_ended:
                self._connection = _Connection(self.config)
            return self._connection


class _Connection:
    """A server process and the thread of its client."""

    def __init__(self, config: MCPConfig) -> None:
        self.tool_descriptions: Sequence[Any] = ()
        self._state = _State()
        self._thread = threading.Thread(
            target=_serve, args=(config, self._state), name="mcp", daemon=True
        )
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
        self.stop: asyncio.Event | None = None
        self.has_ended = False  # True once the server has ended

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Any:
        from mcp import MCPError

        assert self.stop is not None
        try:
            return await self.client.call_tool(name, dict(arguments))
        except MCPError as error:
            if "closed" in str(error).lower():
                self._mark_ended(self.stop)
                raise ToolUnavailable(
                    f"the MCP server of tool '{name}' has ended: {error}"
                ) from error
            raise ToolError(str(error)) from error
        except (OSError, EOFError) as error:
            self._mark_ended(self.stop)
            raise ToolUnavailable(f"the MCP server of tool '{name}' is gone: {error}") from error

    def _mark_ended(self, stop: asyncio.Event) -> None:
        self.has_ended = True
        stop.set()

    def end(self) -> None:
        """Make the thread close the connection. Any thread may call this."""
        if self.loop is not None and self.stop is not None and not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self.stop.set)


def _serve(config: MCPConfig, state: _State) -> None:
    """Run the connection in this thread until it ends. Record an error in `state.failure`."""
    try:
        asyncio.run(_keep_connection(config, state))
    except Exception as error:  # the constructor of the connection reads `failure`
        state.failure = state.failure or f"{type(error).__name__}: {error}"
    finally:
        state.ready.set()


async def _keep_connection(config: MCPConfig, state: _State) -> None:
    """Start the server, list its tools, and keep the connection open until `state.stop` is set."""
    from mcp import Client, StdioServerParameters, stdio_client

    command, *arguments = config.command
    parameters = StdioServerParameters(
        command=command, args=arguments, env=dict(config.env) or None
    )
    with open(os.devnull, "w", encoding="utf-8") as discarded:
        async with Client(stdio_client(parameters, errlog=discarded)) as client:
            state.client = client
            state.loop = asyncio.get_running_loop()
            state.stop = asyncio.Event()
            state.tool_descriptions = (await client.list_tools()).tools
            state.ready.set()
            await state.stop.wait()


class MCPTool:
    """A tool of an MCP server."""

    def __init__(self, server: MCPServer, description: Any) -> None:
        self.server = server
        self.name = str(description.name)
        self.description = str(description.description or "")
        self.parameters: Mapping[str, Any] = description.input_schema

    async def call(self, **arguments: Any) -> str | list[Part]:
        """Return the result as text, or as parts if it has images that the policy may see.

        Other content is replaced by its type, such as "(audio)". Raises ToolError if the server
        reports a failed call, ToolUnavailable if the server is gone.
        """
        result = await self.server.call(self.name, arguments)
        parts = [part.text if part.type == "text" else f"({part.type})" for part in result.content]
        text = "\n".join(parts)
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
