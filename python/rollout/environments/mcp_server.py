"""One MCP server: how the configuration names it, its process or address, and the calls of its
tools. The package ``mcp`` speaks the protocol, with servers of its versions 1 and 2."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import ipaddress
import json
import os
import shutil
import signal
import subprocess
import sys
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, ClassVar, cast

from rollout.environments import ArgumentInvalid, PackageMissing
from rollout.errors import RolloutError
from rollout.tools import ToolError, ToolTimeout, shortened
from rollout.waiting import waits_for

MOST_BYTES = 16 << 20
"""Largest message of a server."""
_INHERITED = ("HOME", "LANG", "LC_ALL", "LC_CTYPE", "LOGNAME", "PATH", "TMPDIR", "TZ", "USER")
_GRACE_SECONDS = 2.0
"""How long a server may take to end, and one that let a call time out to answer again."""
_TAIL = 2000
_MOST_PAGES = 100
_ALONE = "run the server alone to see the reason"
_EXAMPLE = 'write for example `{ command = ["python", "server.py"] }`'


class ServerFailed(RolloutError):
    """A server could not be started, ended, or does not answer."""

    reason: ClassVar[str] = "MCP_SERVER_FAILED"


class ResultRefused(RolloutError):
    """A tool returned what the policy can't read."""

    reason: ClassVar[str] = "TOOL_BAD_RESULT"


@dataclass(frozen=True, slots=True)
class Settings:
    """A table ``[environment.args.servers.NAME]``.

    command: program and arguments of a server that speaks over its standard input and output; empty
    for one at ``url``. env: names of environment variables that it gets. headers: HTTP header ->
    name of the environment variable with its value. remote: whether ``url`` may be another host.
    per_episode: whether each episode has a separate process. allow: the only tools that are
    offered; empty: all. deny: tools that are not. start_seconds: longest time of a start.
    """

    name: str
    command: tuple[str, ...] = ()
    url: str = ""
    env: tuple[str, ...] = ()
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    remote: bool = False
    per_episode: bool = False
    allow: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()
    start_seconds: float = 30.0

    @classmethod
    def read(cls, name: str, table: Any) -> Settings:
        """Read a table. Raises ``ArgumentInvalid``."""
        at = f"environment.args.servers.{name}"

        def wrong(what: str, fix: str) -> ArgumentInvalid:
            return ArgumentInvalid(f"`{at}` {what}", fix=fix)

        def texts(key: str) -> tuple[str, ...]:
            value: Any = given.get(key, [])
            if not isinstance(value, list) or not all(isinstance(each, str) for each in cast("list[Any]", value)):
                raise wrong(f"has `{key} = {value!r}`, not a list of texts", f'write `{key} = ["..."]`')
            return tuple(cast("list[str]", value))

        if not isinstance(table, dict):
            raise wrong(f"is {table!r}, not a table", _EXAMPLE)
        given = cast("dict[str, Any]", table)
        known = ("command", "url", "env", "headers", "remote", "per", "allow", "deny", "start_seconds")
        if unknown := sorted(set(given) - set(known)):
            raise wrong(f"has the unknown key `{unknown[0]}`", f"the keys are: {', '.join(known)}")
        command, url, env = texts("command"), str(given.get("url", "")), texts("env")
        if bool(command) == bool(url):
            raise wrong("needs either `command` or `url`", _EXAMPLE)
        seconds, per, headers = given.get("start_seconds", 30.0), given.get("per", "worker"), given.get("headers", {})
        if not isinstance(seconds, int | float) or isinstance(seconds, bool) or not 0 < seconds <= 3600:
            raise wrong(f"has `start_seconds = {seconds!r}`", "write a number of seconds up to 3600")
        if per not in ("worker", "episode"):
            raise wrong(f"has `per = {per!r}`", 'write "worker" or "episode"')
        if not isinstance(headers, dict) or not all(isinstance(each, str) for each in cast("dict[str, Any]", headers).values()):
            raise wrong(f"has `headers = {headers!r}`", 'write for example `{ Authorization = "MCP_AUTHORIZATION" }`')
        for variable in (*env, *cast("dict[str, str]", headers).values()):
            if variable not in os.environ:
                raise wrong(f"needs the environment variable {variable}, which is not set", "set it, or remove it from the table")
        parts, remote = urllib.parse.urlsplit(url), given.get("remote") is True
        if url and (parts.scheme not in ("http", "https") or not parts.hostname):
            raise wrong(f"has `url = {url!r}`", 'write for example `url = "http://127.0.0.1:8000/mcp"`')
        if url and not remote and not _loopback(parts.hostname or ""):
            raise wrong(f"is on the host {parts.hostname}", "write `remote = true` there if the run may send calls to that host")
        return cls(
            name, command, url, env, cast("dict[str, str]", headers), remote, per == "episode", texts("allow"), texts("deny"),
            float(seconds),
        )  # fmt: skip

    def offers(self, tool: str) -> bool:
        """Whether the policy may call a tool of this name."""
        return tool not in self.deny and (not self.allow or tool in self.allow)

    def files(self, base_dir: str) -> list[str]:
        """Absolute paths of the arguments of ``command`` that are files."""
        paths = [os.path.abspath(os.path.join(base_dir, part)) for part in self.command[1:]]
        return [path for path in paths if os.path.isfile(path)]


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool of a server. parameters: JSON schema of its arguments."""

    server: str
    name: str
    description: str
    parameters: Mapping[str, Any]

    @property
    def digest(self) -> str:
        """Of everything that the policy reads, ``sha256-<hex>``."""
        text = json.dumps([self.name, self.description, self.parameters], sort_keys=True)
        return f"sha256-{sha256(text.encode()).hexdigest()}"

    @property
    def schema(self) -> Mapping[str, Any]:
        """The tool as in ``tools`` of OpenAI's API."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


class Server:
    """A connection to a server. After a failure it is ``broken``, and another one must be
    opened."""

    def __init__(self, settings: Settings, base_dir: str) -> None:
        """base_dir: folder in which the server starts."""
        self.settings, self._base_dir = settings, base_dir
        self._client: Any = None
        self._transport: _Process | None = None
        self._closing = asyncio.Event()
        self._opened: asyncio.Future[None] | None = None
        self._task: asyncio.Task[None] | None = None
        self._failure = ""

    @property
    def broken(self) -> bool:
        """Whether it can't be called any more."""
        return bool(self._reason) or self._closing.is_set()

    @property
    def _reason(self) -> str:
        return self._failure or (self._transport.failure if self._transport else "")

    async def open(self) -> None:
        """Start the server, or connect to it. Raises ``ServerFailed``, ``PackageMissing``."""
        self._opened = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._run(self._opened), name=f"mcp {self.settings.name}")
        seconds = self.settings.start_seconds
        try:
            async with asyncio.timeout(seconds):
                await asyncio.shield(self._opened)
        except TimeoutError:
            self._failure = f"did not answer within {seconds:g} s of its start"
            await self.close()
            raise self._failed("", fix="correct the server, or raise `start_seconds`") from None
        except BaseException:
            await self.close()
            raise

    async def tools(self) -> list[Tool]:
        """The tools that the server has now and the configuration offers, in the server's order.
        Raises ``ServerFailed``."""
        found: list[Tool] = []
        try:
            async with asyncio.timeout(self.settings.start_seconds):
                cursor = None
                for _ in range(_MOST_PAGES):
                    page = await self._client.list_tools(cursor=cursor, cache_mode="bypass")
                    found += [
                        Tool(self.settings.name, tool.name, tool.description or "", dict(tool.input_schema))
                        for tool in page.tools
                    ]
                    if (cursor := page.next_cursor) is None:
                        break
        except TimeoutError:
            self._failure = f"did not list its tools within {self.settings.start_seconds:g} s"
            raise self._failed("") from None
        except Exception as error:
            raise self._failed("listing its tools", error) from error
        return [tool for tool in found if self.settings.offers(tool.name)]

    async def call(self, tool: str, arguments: Mapping[str, Any], seconds: float) -> tuple[str, bool]:
        """The text of a result, and whether it is the tool's error. Raises ``ToolError`` for
        arguments that the server refuses, ``ToolTimeout``, ``ResultRefused``, ``ServerFailed``."""
        mcp = package()
        if self.broken:
            raise self._failed(f"before `{tool}`")
        try:
            async with asyncio.timeout(seconds):
                with self._waits(tool):
                    result = await self._client.call_tool(tool, dict(arguments))
        except TimeoutError:  # the client has cancelled the call
            await self._check()
            raise ToolTimeout(tool, seconds, f" of the MCP server `{self.settings.name}`") from None
        except mcp.MCPError as error:
            if error.code == -32602 and not self._reason:  # invalid params
                raise ToolError(error.message) from error
            raise self._failed(f"calling `{tool}`", error) from error
        except (RuntimeError, ValueError) as error:  # does not fit the tool's schema, or the protocol's
            if self._reason:
                raise self._failed(f"calling `{tool}`", error) from error
            raise self._refused(tool, f"an invalid result: {shortened(str(error), 300)}") from error
        return self._text(tool, result), bool(result.is_error)

    def _waits(self, tool: str) -> contextlib.AbstractContextManager[None]:
        """What people see as long as a call has no answer."""
        pid = self._transport.pid if self._transport else 0
        where = f"process {pid}" if pid else self.settings.url
        fix = (
            f"see why {where} does not answer; what it prints is in the worker's log" if pid else f"see in the log of {where} why"
        )
        return waits_for(f"waits for the tool `{tool}` of the MCP server `{self.settings.name}` ({where})", fix, process=pid)

    async def close(self) -> None:
        """End the server's process, or the connection. Idempotent."""
        self._closing.set()
        if self._task is None or self._opened is None:
            return
        if self._opened.done():
            await asyncio.wait([self._task], timeout=3 * _GRACE_SECONDS)
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _run(self, opened: asyncio.Future[None]) -> None:
        """Hold the connection: one task must enter and leave it."""
        try:
            async with contextlib.AsyncExitStack() as stack:
                transport = await self._connect(stack)
                self._client = await stack.enter_async_context(package().Client(transport))
                opened.set_result(None)
                await self._closing.wait()
        except Exception as error:
            if opened.done():
                self._failure = self._reason or f"lost its connection: {_one_line(error)}"
            else:
                opened.set_exception(error if isinstance(error, RolloutError) else self._failed("starting it", error))

    async def _connect(self, stack: contextlib.AsyncExitStack) -> Any:
        """The transport of the package's client."""
        if not self.settings.url:
            self._transport = _Process(self.settings, self._base_dir)
            return self._transport
        import httpx2
        from mcp.client.streamable_http import streamable_http_client

        headers = {header: os.environ[name] for header, name in self.settings.headers.items()}
        timeout = httpx2.Timeout(self.settings.start_seconds, read=None)  # calls have their own deadline
        http = httpx2.AsyncClient(headers=headers, timeout=timeout, trust_env=self.settings.remote)
        await stack.enter_async_context(http)
        return streamable_http_client(self.settings.url, http_client=http, max_sse_event_size=MOST_BYTES)

    async def _check(self) -> None:
        """Break the connection if the server does not answer after a call that took too long."""
        try:
            async with asyncio.timeout(_GRACE_SECONDS):
                await self._client.list_tools(cache_mode="bypass")
        except Exception:
            self._failure = self._reason or "does not answer since a call took too long"

    def _failed(self, during: str, error: BaseException | None = None, fix: str = _ALONE) -> ServerFailed:
        """Break the connection, and describe why."""
        self._failure = self._reason or f"failed: {_one_line(error)}"
        when = f" ({during})" if during else ""
        return ServerFailed(f"the MCP server `{self.settings.name}` {self._failure}{when}", fix=fix)

    def _refused(self, tool: str, what: str) -> ResultRefused:
        return ResultRefused(
            f"the tool `{tool}` of the MCP server `{self.settings.name}` returned {what}",
            fix=f"correct the tool, or add it to `deny` of `environment.args.servers.{self.settings.name}`",
        )

    def _text(self, tool: str, result: Any) -> str:
        """What the policy reads of a result."""
        texts: list[str] = []
        for part in result.content:
            resource: Any = getattr(part, "resource", None)
            if part.type == "text":
                texts.append(part.text)
            elif part.type == "resource_link":
                texts.append(f"{part.name}: {part.uri}")
            elif part.type == "resource" and hasattr(resource, "text"):
                texts.append(resource.text)
            else:
                kind = getattr(part, "mime_type", None) or getattr(resource, "mime_type", None) or part.type
                raise self._refused(tool, f"content of the type {kind}, and the policy reads text only")
        if not texts and result.structured_content is not None:
            texts.append(json.dumps(result.structured_content, ensure_ascii=False))
        return shortened("\n".join(texts))


class _Process:
    """A server's process, as a transport of the package: a message is a line of JSON. failure: why
    nothing more can be read; empty while all is well."""

    def __init__(self, settings: Settings, base_dir: str) -> None:
        self._settings, self._base_dir = settings, base_dir
        self._process: asyncio.subprocess.Process | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._tail = b""
        self.failure = ""

    async def __aenter__(self) -> tuple[Any, Any]:
        """Start the process. Returns the streams of messages from and to it. Raises
        ``ServerFailed``."""
        import anyio

        program, *arguments = self._settings.command
        if "/" in program:
            program = os.path.abspath(os.path.join(self._base_dir, program))
        variables = {name: os.environ[name] for name in (*_INHERITED, *self._settings.env) if name in os.environ}
        # `python` is the interpreter that has the package
        variables["PATH"] = f"{os.path.dirname(sys.executable)}{os.pathsep}{variables.get('PATH', os.defpath)}"
        try:
            found = shutil.which(program, path=variables["PATH"]) or program
            self._process = await asyncio.create_subprocess_exec(
                found, *arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                cwd=self._base_dir, env=variables, limit=MOST_BYTES,
            )  # fmt: skip
        except OSError as error:
            raise ServerFailed(
                f"the MCP server `{self._settings.name}` can't be started: {self._settings.command[0]}: {error.strerror}",
                fix=f"correct `command` of `environment.args.servers.{self._settings.name}`",
            ) from error
        to_client, from_server = anyio.create_memory_object_stream[Any](0)
        to_server, from_client = anyio.create_memory_object_stream[Any](0)
        parts = (self._read(to_client), self._write(from_client), self._log())
        self._tasks = [asyncio.create_task(part, name=f"mcp {self._settings.name}") for part in parts]
        return from_server, to_server

    @property
    def pid(self) -> int:
        """The process id; 0 before it has started."""
        return self._process.pid if self._process is not None else 0

    async def __aexit__(self, *error: object) -> None:
        """End the process and those that it started: first by the end of its input."""
        process = self._process
        assert process is not None and process.stdin is not None
        for task in self._tasks:
            task.cancel()
        children = _descendants(process.pid)
        process.stdin.close()
        if not self.failure:
            await _ended(process)
        for pid in (process.pid, *children) if process.returncode is None else children:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        await _ended(process)
        self.failure = self.failure or "was stopped"

    async def _read(self, to_client: Any) -> None:
        import anyio
        from mcp.shared.message import SessionMessage
        from mcp_types import jsonrpc_message_adapter

        assert self._process is not None and self._process.stdout is not None
        async with to_client:
            try:
                while line := await self._process.stdout.readline():
                    if not line.strip():
                        continue
                    try:
                        message = jsonrpc_message_adapter.validate_json(line, by_name=False)
                    except ValueError:
                        shown = shortened(line.decode(errors="replace").strip(), 100)
                        self.failure = f"wrote a line to its output that is not a message of the protocol: {shown!r}"
                        return
                    await to_client.send(SessionMessage(message))
                self.failure = await self._end()
            except ValueError:
                self.failure = f"wrote a message of more than {MOST_BYTES >> 20} MiB"
            except (anyio.BrokenResourceError, anyio.ClosedResourceError):
                pass

    async def _write(self, from_client: Any) -> None:
        assert self._process is not None and self._process.stdin is not None
        stdin = self._process.stdin
        try:
            async with from_client:
                async for item in from_client:
                    stdin.write(item.message.model_dump_json(by_alias=True, exclude_unset=True).encode() + b"\n")
                    await stdin.drain()
        except OSError:  # the end of its output follows, or the call's deadline
            pass

    async def _log(self) -> None:
        """Copy the server's standard error to ours."""
        assert self._process is not None and self._process.stderr is not None
        while chunk := await self._process.stderr.read(1 << 16):
            self._tail = (self._tail + chunk)[-_TAIL:]
            sys.stderr.write(chunk.decode(errors="replace"))

    async def _end(self) -> str:
        """How the process ended, with the last line of its standard error."""
        assert self._process is not None
        await _ended(self._process)
        if (code := self._process.returncode) is None:
            return "closed its output"
        await asyncio.wait(self._tasks[2:], timeout=_GRACE_SECONDS)
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        lines = self._tail.decode(errors="replace").strip().splitlines()
        return f"ended ({how}{': ' + shortened(lines[-1].strip(), 300) if lines else ''})"


async def _ended(process: asyncio.subprocess.Process) -> None:
    """Wait for the end of a process, but not long: a process that it left may have its output."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_GRACE_SECONDS):
            await process.wait()


def package() -> Any:
    """The package ``mcp``. Raises ``PackageMissing``."""
    try:
        package: Any = importlib.import_module("mcp")
    except ImportError as error:
        raise PackageMissing("mcp", error) from error
    if not hasattr(package, "Client"):
        raise PackageMissing("mcp", ImportError("the client needs version 2.3 of the package mcp; servers may be older"))
    return package


def _loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _one_line(error: BaseException | None) -> str:
    """The innermost error of groups, in one line."""
    while isinstance(error, BaseExceptionGroup):
        error = cast("BaseExceptionGroup[BaseException]", error).exceptions[0]
    return shortened(" ".join(str(error).split()) or type(error).__name__, 300)


def _descendants(pid: int) -> list[int]:
    """The processes that a process has started, and theirs. Empty where ``/proc`` does not list
    them."""
    found: list[int] = []
    for listed in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, listed.read_text().split()):
                found += [child, *_descendants(child)]
    return found
