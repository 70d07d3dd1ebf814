"""A server of the MCP protocol without a package, for tests: one table, and every way to misbehave.

python mcp_double.py [--tools more|fewer|other] [--trouble exit|hang|text|junk|large|long|change]
[--http]
"""

from __future__ import annotations

import argparse
import http.server
import json
import os
import sys
import threading
import time
from typing import Any

CAPITALS = {"bali": "moru", "kepo": "tasi"}
TEXT = {"type": "object", "properties": {"country": {"type": "string"}}, "required": ["country"]}
TOOLS = {
    "lookup": ("Find the capital of a country.", TEXT),
    "count": ("Count the calls.", {"type": "object", "properties": {}}),
    "table": ("List the capitals.", {"type": "object", "properties": {}}),
    "picture": ("Draw a map.", {"type": "object", "properties": {}}),
    "sleep": ("Wait.", {"type": "object", "properties": {"seconds": {"type": "number"}}}),
    "leave": ("End the server.", {"type": "object", "properties": {}}),
}


class Server:
    """Answers requests; each call has its own thread, so that calls overlap."""

    def __init__(self, trouble: str, tools: str) -> None:
        self.trouble, self.calls, self.lock = trouble, 0, threading.Lock()
        self.tools = dict(TOOLS)
        if tools == "fewer":
            del self.tools["count"]
        if tools == "more":
            self.tools["delete"] = ("Delete a country.", TEXT)
        if tools == "other":
            self.tools["lookup"] = ("Find a city.", TEXT)

    def write(self, message: dict[str, Any]) -> None:
        with self.lock:
            sys.stdout.write(json.dumps({"jsonrpc": "2.0"} | message) + "\n")
            sys.stdout.flush()

    def run(self) -> None:
        if self.trouble == "exit":
            print("no table here", file=sys.stderr)
            sys.exit(3)
        if self.trouble == "text":
            print("Welcome to the capitals!", flush=True)
        for line in sys.stdin:
            request = json.loads(line)
            if "id" in request and self.trouble != "hang":
                threading.Thread(target=self.answer, args=(request,), daemon=True).start()
            elif request.get("method") == "notifications/cancelled" and (log := os.environ.get("CANCELLED")):
                with open(log, "a") as file:
                    file.write(line)

    def answer(self, request: dict[str, Any]) -> None:
        self.write({"id": request["id"]} | self.outcome(request))

    def outcome(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            return {"result": self.result(request["method"], request.get("params") or {})}
        except LookupError as error:
            return {"error": {"code": -32602, "message": str(error.args[0])}}
        except NotImplementedError:
            return {"error": {"code": -32601, "message": "unknown method"}}

    def result(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        if method == "initialize":
            version = params["protocolVersion"]
            return {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": {"name": "double", "version": "1"}}
        if method == "tools/list":
            names = list(self.tools)
            at = int(params.get("cursor") or 0)  # two on a page
            page = [{"name": n, "description": self.tools[n][0], "inputSchema": self.tools[n][1]} for n in names[at : at + 2]]
            return {"tools": page} | ({"nextCursor": str(at + 2)} if at + 2 < len(names) else {})
        if method == "tools/call":
            return self.called(params["name"], params.get("arguments") or {})
        raise NotImplementedError

    def called(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        self.calls += 1
        match self.trouble:
            case "junk":
                print('{"jsonrpc": "2.0", "id": 1, "result": {', flush=True)
            case "large":
                return {"content": [{"type": "text", "text": "x" * (20 << 20)}]}
            case "long":
                return {"content": [{"type": "text", "text": "x" * 100_000}]}
            case "change":
                del self.tools["count"]
            case _:
                pass
        if name == "lookup":
            if "country" not in arguments:
                raise LookupError("`country` is missing")
            known = arguments["country"] in CAPITALS
            text = CAPITALS[arguments["country"]] if known else f"unknown country {arguments['country']}"
            return {"content": [{"type": "text", "text": text}], "isError": not known}
        if name == "count":
            return {"content": [{"type": "text", "text": str(self.calls)}]}
        if name == "table":
            return {"content": [], "structuredContent": CAPITALS}
        if name == "picture":
            return {"content": [{"type": "image", "data": "AAAA", "mimeType": "image/png"}]}
        if name == "sleep":
            time.sleep(arguments["seconds"])
            return {"content": [{"type": "text", "text": "awake"}]}
        print("asked to leave", file=sys.stderr, flush=True)
        os._exit(7)


def serve_http(server: Server) -> None:
    """Serve streamable HTTP on a free port, which the first line of the output names."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["content-length"])))
            body = b""
            if "id" in request:
                body = json.dumps({"jsonrpc": "2.0", "id": request["id"]} | server.outcome(request)).encode()
            self.send_response(200 if body else 202)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self) -> None:
            self.send_error(405)

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listener:
        print(listener.server_port, flush=True)
        listener.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--trouble", default="")
    parser.add_argument("--tools", default="")
    parser.add_argument("--http", action="store_true")
    arguments = parser.parse_args()
    server = Server(arguments.trouble, arguments.tools)
    if arguments.http:
        serve_http(server)
    else:
        server.run()


if __name__ == "__main__":
    main()
