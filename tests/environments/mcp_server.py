"""A server that speaks MCP over its standard input and output, for the tests of the client."""

import os

from mcp.server import MCPServer

server = MCPServer("test")


@server.tool()
def add(a: int, b: int) -> str:
    """Adds two whole numbers."""
    return str(a + b)


@server.tool()
def fail() -> str:
    """Always fails."""
    raise ValueError("no luck")


@server.tool()
def die() -> str:
    """Ends the server."""
    os._exit(1)


server.run("stdio")
