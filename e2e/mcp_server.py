"""A server with the tools of ``rollout_testing.mcptest``, for the package mcp 1.x and 2.x.

python mcp_server.py [--http]
"""

import asyncio
import os
import sys

try:
    from mcp.server import MCPServer
    from mcp.server.mcpserver import Image
    from mcp.server.mcpserver.exceptions import ToolError
except ImportError:  # 1.x
    from mcp.server.fastmcp import FastMCP as MCPServer
    from mcp.server.fastmcp import Image
    from mcp.server.fastmcp.exceptions import ToolError

CAPITALS = {"bali": "moru", "kepo": "tasi"}
server = MCPServer("capitals")
calls = 0


@server.tool()
def lookup(country: str) -> str:
    """Find the capital of a country."""
    if country not in CAPITALS:
        raise ToolError(f"unknown country {country}")
    return CAPITALS[country]


@server.tool()
def count() -> int:
    """Count the calls."""
    global calls
    calls += 1
    return calls


@server.tool()
def table() -> dict[str, str]:
    """List the capitals."""
    return CAPITALS


@server.tool()
def picture() -> Image:
    """Draw a map."""
    return Image(data=b"\x89PNG", format="png")


@server.tool()
async def sleep(seconds: float) -> str:
    """Wait."""
    await asyncio.sleep(seconds)
    return "awake"


@server.tool()
def leave() -> None:
    """End the server."""
    os._exit(7)


def main() -> None:
    """Serve standard input, or HTTP on a free port that the first line of the output names."""
    if "--http" not in sys.argv:
        server.run()
        return
    import socket

    import uvicorn

    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        app = server.streamable_http_app()
        uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listener])


if __name__ == "__main__":
    main()
