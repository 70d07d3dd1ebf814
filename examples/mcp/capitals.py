"""An MCP server over a table of invented countries and their capitals.

python capitals.py capitals.json
"""

import json
import sys
from pathlib import Path

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

CAPITALS = json.loads(Path(sys.argv[1]).read_text())
server = MCPServer("capitals")


@server.tool()
def lookup(country: str) -> str:
    """Find the capital of a country."""
    if country not in CAPITALS:
        raise ToolError(f"unknown country {country}")  # the policy reads it
    return CAPITALS[country]


if __name__ == "__main__":
    server.run()
