"""A server that speaks MCP over its standard input and output, for the tests of the client."""

import os
from base64 import b64decode

from mcp.server import MCPServer
from mcp.server.mcpserver import Image

DOT = b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4z8AAAAMBAQDJ/pLvAAAAAElFTkSuQmCC"
)

server = MCPServer("test")


@server.tool()
def add(a: int, b: int) -> str:
    """Adds two whole numbers."""
    return str(a + b)


@server.tool()
def draw() -> list:
    """Draws a dot."""
    return ["a dot:", Image(data=DOT, format="png")]


@server.tool()
def fail() -> str:
    """Always fails."""
    raise ValueError("no luck")


@server.tool()
def die() -> str:
    """Ends the server."""
    os._exit(1)


server.run("stdio")
