"""The tools that come with rollout: ``python``, ``bash``, and ``edit`` in a sandbox, ``search``
over a folder, and ``fetch``."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import re
import time
import urllib.parse
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeAlias, cast

from rollout.environment import Observation, ToolCall, Turn, failed, reason_of
from rollout.environment import Result as EpisodeResult
from rollout.errors import RolloutError
from rollout.plugin.schema import function_schema
from rollout.sandbox import Process, Result, Sandbox, Sandboxes, Spec, python_binds

Key: TypeAlias = tuple[str, int]
"""Of an episode: its task and sample."""
Schemas: TypeAlias = tuple[Mapping[str, Any], ...]
"""Functions as in ``tools`` of OpenAI's API."""
LONGEST = 16_000
"""Characters of a result that the policy reads; the middle of a longer one is left out."""
_LONGEST_LINE = 16 << 20  # bytes of an answer of the interpreter: it sends 1 MiB of text, escaped
BOXED = ("python", "bash", "edit")
NAMES = (*BOXED, "search", "fetch")


class ToolsInvalid(RolloutError):
    """``[environment.args]`` of tools is wrong."""

    reason: ClassVar[str] = "ENVIRONMENT_ARGUMENT"


def named_tools(args: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """The tools of ``[environment.args]``: those of files, ``file.py:function``, and those of
    ``NAMES``. ``search`` is a folder, ``fetch`` a list of hosts. Raises ``ToolsInvalid``."""
    if unknown := sorted(set(args) - {"tools", "search", "fetch"}):
        raise ToolsInvalid(f"`environment.args.{unknown[0]}` is unknown", fix="the arguments of tools are: tools, search, fetch")
    names: Any = args.get("tools")
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in cast("list[Any]", names)):
        raise ToolsInvalid("`environment.args.tools` names no tools", fix='write for example `tools = ["calculator.py:add"]`')
    found = cast("list[str]", names)
    files, ours = [name for name in found if ":" in name], [name for name in found if ":" not in name]
    if wrong := sorted(set(ours) - set(NAMES)):
        raise ToolsInvalid(f"unknown tool `{wrong[0]}`", fix=f"name file.py:function, or one of: {', '.join(NAMES)}")
    for name, what in (("search", "a folder"), ("fetch", "the hosts that may be asked")):
        if name in ours and not args.get(name):
            raise ToolsInvalid(f"the tool `{name}` needs `environment.args.{name}`", fix=f"name {what}")
    return files, ours


class ToolError(RolloutError):
    """A call that is the policy's mistake. Its text is the result that the policy reads."""

    reason: ClassVar[str] = "TOOL_RAISED"


class ToolTimeout(RolloutError):
    """A tool took longer than ``environment.tool_timeout_seconds``."""

    reason: ClassVar[str] = "TOOL_TIMEOUT"

    def __init__(self, name: str, seconds: float, of: str = "") -> None:
        super().__init__(f"the tool `{name}`{of} took longer than {seconds:g} s")


class Toolbox(Protocol):
    """Tools with what they keep for each episode."""

    schemas: Schemas

    async def start(self) -> None:
        """Start processes before the first call. Raises ``RolloutError``."""
        ...

    async def call(self, episode: Key, call: ToolCall) -> str:
        """The text that the policy reads. Raises ``ToolError`` for a mistake of the policy, any
        other error for a failure of the infrastructure."""
        ...

    async def close(self, episode: Key) -> None:
        """Forget what an episode left. Idempotent."""
        ...

    async def shutdown(self) -> None:
        """Stop processes. Idempotent."""
        ...


async def answered(turn: Turn, call: Callable[[ToolCall], Awaitable[tuple[str, bool]]]) -> Observation | EpisodeResult:
    """The messages with the results of a turn's calls, which run concurrently, or a failure of the
    infrastructure.

    call: returns the text of a result, and whether the call was a mistake. It raises ``ToolError``
    for a mistake of the policy, any other error for a failure.
    """

    async def timed(wanted: ToolCall) -> tuple[str, bool, float]:
        began = time.monotonic()
        return *await one(wanted), time.monotonic() - began

    async def one(wanted: ToolCall) -> tuple[str, bool]:
        if wanted.error:
            return wanted.error, True
        try:
            return await call(wanted)
        except ToolError as error:
            return str(error), True

    texts: list[tuple[str, bool, float]] = []
    for found in await asyncio.gather(*(timed(wanted) for wanted in turn.tool_calls), return_exceptions=True):
        if isinstance(found, BaseException):
            return replace(failed(reason_of(found, "TOOL_FAILED")), message=str(found))
        texts.append(found)
    messages = [
        {"role": "tool", "tool_call_id": wanted.id, "name": wanted.name, "content": text}
        for wanted, (text, _, _) in zip(turn.tool_calls, texts, strict=True)
    ]
    metrics = {"tools/calls": float(len(texts)), "tools/errors": float(sum(wrong for _, wrong, _ in texts))}
    return Observation(messages=tuple(messages), metrics=metrics, tool_seconds=tuple(seconds for _, _, seconds in texts))


def unknown_tool(name: str, names: Iterable[str]) -> str:
    """What the policy reads after a call of a tool that does not exist."""
    return f"unknown tool `{name}`; the tools are: {', '.join(names)}"


def shortened(text: str, longest: int = LONGEST) -> str:
    """The text, with its middle left out if it is longer."""
    if len(text) <= longest:
        return text
    half = longest // 2
    return f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[-half:]}"


class Boxed:
    """``python``, ``bash``, and ``edit``: one sandbox for each episode, which keeps its files, and
    the variables of Python. It is opened by the first call."""

    def __init__(self, names: Sequence[str], seconds: float, spec: Spec | None = None, warm: int = 4) -> None:
        """seconds: longest time of a call. spec: of the sandbox. warm: sandboxes that are kept
        ready."""
        self._seconds, self._warm = seconds, warm
        self._spec = spec or Spec(binds=python_binds())
        self._server = Sandboxes()
        self._boxes: dict[Key, Sandbox] = {}
        self._shells: dict[Key, Process] = {}
        self._locks: dict[Key, asyncio.Lock] = {}
        self._numbers = itertools.count()  # of calls
        functions: dict[str, Callable[..., Any]] = {"python": _python, "bash": _bash, "edit": _edit}
        self.schemas: Schemas = tuple(function_schema(functions[name], name) for name in names)

    async def start(self) -> None:
        await self._server.__aenter__()
        await self._server.warm(self._spec, self._warm)

    async def call(self, episode: Key, call: ToolCall) -> str:
        async with self._locks.setdefault(episode, asyncio.Lock()):  # the calls of a turn share the box
            box = await self._box(episode)
            match call.name:
                case "python":
                    return await self._run_python(episode, box, _text_of(call, "code"))
                case "bash":
                    return _shown(await box.run(["bash", "-c", _text_of(call, "command")], wall_time_s=self._seconds))
                case _:
                    return await self._run_edit(box, call)

    async def close(self, episode: Key) -> None:
        self._shells.pop(episode, None)
        self._locks.pop(episode, None)
        if (box := self._boxes.pop(episode, None)) is not None:
            await box.__aexit__()

    async def shutdown(self) -> None:
        self._boxes.clear()
        await self._server.__aexit__()

    async def _box(self, episode: Key) -> Sandbox:
        if episode not in self._boxes:
            box = self._server.open(self._spec)
            await box.__aenter__()
            self._boxes[episode] = box
        return self._boxes[episode]

    async def _run_python(self, episode: Key, box: Sandbox, code: str) -> str:
        shell = self._shells.pop(episode, None)  # back only if it answers: a late answer belongs to no call
        if shell is None:
            shell = await box.start(["python3", "-u", "-c", _SHELL], output_bytes=1 << 30)
        number = next(self._numbers)
        try:
            async with asyncio.timeout(self._seconds):
                await shell.write(json.dumps([number, code]).encode() + b"\n")
                answer = await _answer(shell, number)
            self._shells[episode] = shell
            return shortened(answer)
        except asyncio.CancelledError:
            await asyncio.shield(shell.kill())
            raise
        except TimeoutError:
            ended = f"longer than {self._seconds:g} s"
        except EOFError:
            await shell.kill()
            end = await shell.wait()
            ended = f"the interpreter ended: {end.reason}" + (f", exit code {end.exit_code}" if end.exit_code > 0 else "")
        await shell.kill()
        raise ToolError(f"{ended}; the next call begins with a new interpreter, files are kept")

    async def _run_edit(self, box: Sandbox, call: ToolCall) -> str:
        path, old, new = (_text_of(call, name) for name in ("path", "old", "new"))
        request = json.dumps({"path": path, "old": old, "new": new}).encode()
        result = await box.run(["python3", "-c", _EDITOR], stdin=request, wall_time_s=self._seconds)
        if not result.ok:
            raise ToolError(_shown(result))
        return result.stdout.decode(errors="replace").strip()


class Search:
    """``search``: finds lines in the text files of a folder."""

    def __init__(self, folder: str, seconds: float, most: int = 20) -> None:
        """folder: of the files. seconds: longest time of a call. most: lines of a result."""
        self._folder, self._seconds, self._most = Path(folder), seconds, most
        if not self._folder.is_dir():
            raise RolloutError(f"the folder of `search`, {folder}, does not exist", fix="correct `environment.args.search`")
        self.schemas: Schemas = (function_schema(_search, "search"),)

    async def start(self) -> None:
        """Do nothing, because each call reads the folder."""

    async def call(self, episode: Key, call: ToolCall) -> str:
        """The lines with the words of the query, those with most of them first."""
        words = [word.lower() for word in re.findall(r"\w+", _text_of(call, "query"))]
        if not words:
            raise ToolError("the query has no words")
        return await _in_time("search", self._seconds, asyncio.to_thread(self._find, words))

    async def close(self, episode: Key) -> None:
        """Do nothing, because episodes keep nothing."""

    async def shutdown(self) -> None:
        """Do nothing: no process was started."""

    def _find(self, words: list[str]) -> str:
        found: list[tuple[int, str, int, str]] = []
        for path in sorted(self._folder.rglob("*")):
            if not path.is_file() or path.is_symlink():
                continue
            for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
                lowered = line.lower()
                if count := sum(word in lowered for word in words):
                    found.append((-count, str(path.relative_to(self._folder)), number, line.strip()))
        found.sort()
        lines = [f"{name}:{number}: {line}" for _, name, number, line in found[: self._most]]
        return shortened("\n".join(lines)) if lines else "nothing found"


class Fetch:
    """``fetch``: reads pages of listed hosts by HTTP."""

    def __init__(self, hosts: Sequence[str], seconds: float) -> None:
        """hosts: the only ones that may be asked, also by a redirection."""
        self._hosts, self._seconds = frozenset(hosts), seconds
        self.schemas: Schemas = (function_schema(_fetch, "fetch"),)

    async def start(self) -> None:
        """Do nothing, because each call connects."""

    async def call(self, episode: Key, call: ToolCall) -> str:
        """The text of the page."""
        return await _in_time("fetch", self._seconds, asyncio.to_thread(self._get, _text_of(call, "url")))

    async def close(self, episode: Key) -> None:
        """Do nothing, because episodes keep nothing."""

    async def shutdown(self) -> None:
        """Do nothing: no process was started."""

    def _get(self, url: str) -> str:
        import requests

        for _ in range(5):
            parts = urllib.parse.urlsplit(url)
            if parts.scheme not in ("http", "https") or parts.netloc not in self._hosts:
                allowed = ", ".join(sorted(self._hosts))
                raise ToolError(f"{parts.scheme}://{parts.netloc} can't be fetched; allowed are {allowed}")
            try:
                answer = requests.get(url, timeout=self._seconds, allow_redirects=False, stream=True)
                if not answer.is_redirect:
                    body = answer.raw.read(1 << 20, decode_content=True).decode(answer.encoding or "utf-8", "replace")
                    return shortened(f"{answer.status_code}\n{body}")
                url = urllib.parse.urljoin(url, answer.headers["location"])
            except requests.RequestException as error:
                raise ToolError(f"{url}: {error}") from error
        raise ToolError(f"{url}: too many redirections")


async def _in_time(name: str, seconds: float, work: Coroutine[Any, Any, str]) -> str:
    """The result of the work of a tool. Raises ``ToolTimeout``."""
    try:
        async with asyncio.timeout(seconds):
            return await work
    except TimeoutError:
        raise ToolTimeout(name, seconds) from None


def _text_of(call: ToolCall, name: str) -> str:
    value = call.arguments.get(name)
    if not isinstance(value, str):
        raise ToolError(f"`{call.name}` needs the argument `{name}`, a text")
    return value


def _shown(result: Result) -> str:
    text = (result.stdout + result.stderr).decode(errors="replace").strip("\n")
    if result.reason != "EXITED":
        text += f"\n[{result.reason}]"
    elif result.exit_code:
        text += f"\n[exit code {result.exit_code}]"
    return shortened(text.lstrip("\n"))


async def _answer(shell: Process, number: int) -> str:
    """The answer of the interpreter to a call. Lines of other calls, and those that the code wrote,
    are skipped. Raises ``EOFError`` at its end, or if a line is too long to be an answer."""
    line = bytearray()
    while True:
        event = await shell.read()
        if event is None or len(line) > _LONGEST_LINE:
            raise EOFError
        if event[0] != "stdout":
            continue
        *lines, rest = event[1].split(b"\n")
        for part in lines:
            with contextlib.suppress(ValueError):
                answer: Any = json.loads(line + part)
                if isinstance(answer, list) and answer[:1] == [number] and isinstance(answer[-1], str):
                    return answer[-1]
            line = bytearray()
        line += rest


def _python(code: str) -> None:
    """Run Python code in an interpreter that keeps its variables. The result is what it prints, and
    the value of the last expression.

    code: the code
    """


def _bash(command: str) -> None:
    """Run a command line with bash in /home/sandbox. Files are kept between calls.

    command: the command line
    """


def _edit(path: str, old: str, new: str) -> None:
    """Replace a text in a file, or create a file.

    path: the file
    old: the text, which must occur once; empty to create the file
    new: what replaces it
    """


def _search(query: str) -> None:
    """Find lines in the files of a folder.

    query: words
    """


def _fetch(url: str) -> None:
    """Read a page.

    url: address of the page, with http or https
    """


# Output of programs that the code starts is part of the result, so descriptors 1 and 2 are a file.
_SHELL = """
import ast, json, os, sys, traceback
answers = os.fdopen(os.dup(1), "w")
path = "/tmp/.output"
sink = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
os.dup2(sink, 1)
os.dup2(sink, 2)
names = {"__name__": "__main__"}
for line in sys.stdin:
    os.ftruncate(sink, 0)
    try:
        number, code = json.loads(line)
        tree = ast.parse(code, "code")
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, "code", "exec"), names)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), "code", "eval"), names)
            if value is not None:
                print(repr(value))
    except SystemExit:
        print("SystemExit")
    except BaseException as error:
        shown = traceback.format_exception(error)
        print(shown[0] + "".join(part for part in shown[1:] if 'File "<string>"' not in part), end="")
    sys.stdout.flush()
    sys.stderr.flush()
    with open(path, errors="replace") as file:
        text = file.read(1 << 20)
    answers.write(json.dumps([number, text.rstrip("\\n")]) + "\\n")
    answers.flush()
"""
_EDITOR = """
import json, os, sys
request = json.load(sys.stdin)
path, old, new = request["path"], request["old"], request["new"]
if not old:
    if os.path.exists(path):
        sys.exit(f"{path} exists: give the text to replace in `old`")
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    text = new
else:
    try:
        text = open(path).read()
    except OSError as error:
        sys.exit(f"{path}: {error.strerror}")
    if text.count(old) != 1:
        sys.exit(f"the text in `old` occurs {text.count(old)} times in {path}; it must occur once")
    text = text.replace(old, new)
with open(path, "w") as file:
    file.write(text)
print(f"wrote {path}: {len(text.splitlines())} lines")
"""
