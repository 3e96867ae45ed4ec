"""Tools of a Model Context Protocol (MCP) server, called through MCP's official client.

See modelcontextprotocol.io. The client runs in a thread with its own event loop, because its
connection belongs to the asyncio task that opened it, and must outlive the episodes and event loops
that use it.
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


class MCPConfig(ToolConfig):
    """The tools of a Model Context Protocol server that uses standard input and output."""

    builds: ClassVar[str] = "ratchet.environments.tool_use.mcp:mcp_tools"

    command: tuple[str, ...] = Field(
        min_length=1, description="The program that is the server, and its arguments."
    )
    env: dict[str, str] = Field(
        {}, description="Its environment variables, beside a few that any program needs."
    )
    only: tuple[str, ...] = Field((), description="Offer these tools alone; empty: all.")
    start_s: float = Field(30.0, gt=0, description="In which it must have listed its tools.")


END_S = 5.0


class MCPServer:
    """A running MCP server. Raises ToolUnavailable at construction if it does not start."""

    def __init__(self, config: MCPConfig) -> None:
        try:
            import mcp  # noqa: F401
        except ImportError:
            raise MissingDependency("mcp", extra="envs", needed_for="tools over MCP") from None
        self.config = config
        self._connection = _Connection(config)
        self._lock = threading.Lock()

    @property
    def listed(self) -> Sequence[Any]:
        return self._connection.listed

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """Return the result of a tool call, after restarting the server if it has ended.

        Raises ToolUnavailable if it ends during the call, and ToolError for other MCP errors.
        """
        connection = await asyncio.to_thread(self._living)
        return await asyncio.wrap_future(connection.call(name, arguments))

    def _living(self) -> _Connection:
        with self._lock:
            if self._connection.ended:
                self._connection = _Connection(self.config)
            return self._connection


class _Connection:
    def __init__(self, config: MCPConfig) -> None:
        self.listed: Sequence[Any] = ()
        self._state = _State()
        self._thread = threading.Thread(
            target=_serve, args=(config, self._state), name="mcp", daemon=True
        )
        self._thread.start()
        weakref.finalize(self, self._state.end)
        self._state.ready.wait(config.start_s)
        if self._state.why or not self._state.ready.is_set():
            self._state.end()
            why = self._state.why or f"it did not list its tools within {config.start_s:g} s"
            raise ToolUnavailable(
                f"the MCP server '{' '.join(config.command)}' can't be used: {why}"
            )
        self.listed = self._state.listed

    @property
    def ended(self) -> bool:
        return self._state.gone or not self._thread.is_alive()  # the thread may outlive its server

    def call(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """Return a future of the result."""
        assert self._state.loop is not None
        return asyncio.run_coroutine_threadsafe(self._state.call(name, arguments), self._state.loop)


class _State:
    """The state that a connection shares with its thread.

    It does not reference the connection, so that an unused connection is garbage-collected.
    """

    def __init__(self) -> None:
        self.ready = threading.Event()
        self.why = ""
        self.listed: Sequence[Any] = ()
        self.loop: asyncio.AbstractEventLoop | None = None
        self.client: Any = None
        self.over: asyncio.Event | None = None
        self.gone = False  # True once the server has ended

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Any:
        from mcp import MCPError

        assert self.over is not None
        try:
            return await self.client.call_tool(name, dict(arguments))
        except MCPError as error:
            if "closed" in str(error).lower():
                self._leave(self.over)
                raise ToolUnavailable(
                    f"the MCP server of tool '{name}' has ended: {error}"
                ) from error
            raise ToolError(str(error)) from error
        except (OSError, EOFError) as error:
            self._leave(self.over)
            raise ToolUnavailable(f"the MCP server of tool '{name}' is gone: {error}") from error

    def _leave(self, over: asyncio.Event) -> None:
        self.gone = True
        over.set()

    def end(self) -> None:
        if self.loop is not None and self.over is not None and not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self.over.set)


def _serve(config: MCPConfig, state: _State) -> None:
    try:
        asyncio.run(_hold(config, state))
    except Exception as error:  # no caller sees it: the constructor reads `why`
        state.why = state.why or f"{type(error).__name__}: {error}"
    finally:
        state.ready.set()


async def _hold(config: MCPConfig, state: _State) -> None:
    from mcp import Client, StdioServerParameters, stdio_client

    command, *arguments = config.command
    parameters = StdioServerParameters(
        command=command, args=arguments, env=dict(config.env) or None
    )
    with open(os.devnull, "w", encoding="utf-8") as silence:
        async with Client(stdio_client(parameters, errlog=silence)) as client:
            state.client, state.loop, state.over = (
                client,
                asyncio.get_running_loop(),
                asyncio.Event(),
            )
            state.listed = (await client.list_tools()).tools
            state.ready.set()
            await state.over.wait()


class MCPTool:
    def __init__(self, server: MCPServer, listed: Any) -> None:
        self.server, self.name, self.description = (
            server,
            str(listed.name),
            str(listed.description or ""),
        )
        self.parameters: Mapping[str, Any] = listed.input_schema

    async def call(self, **arguments: Any) -> str:
        """Return the text of the result; other content stands as its type, such as "(image)".

        Raises ToolError if the server reports a failed call, ToolUnavailable if the server is gone.
        """
        result = await self.server.call(self.name, arguments)
        parts = [part.text if part.type == "text" else f"({part.type})" for part in result.content]
        text = "\n".join(parts)
        if result.is_error:
            raise ToolError(text)
        return text


def mcp_tools(config: MCPConfig) -> list[MCPTool]:
    """Return the tools of a new server. Raises ConfigError for a name in `only` that it lacks."""
    server = MCPServer(config)
    tools = {listed.name: MCPTool(server, listed) for listed in server.listed}
    for name in config.only:
        if name not in tools:
            raise ConfigError(f"the MCP server has no tool '{name}': it has {', '.join(tools)}")
    return [tool for name, tool in tools.items() if not config.only or name in config.only]
