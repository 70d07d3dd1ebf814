"""The forms in which models write tool calls.

A form has an opening marker. From there on, a region collects text until it is a call, or can't
become one.
"""

# ruff: noqa: RUF001 (DeepSeek's tokens have such characters)

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from rollout_workers.chat.scan import Brackets

Schemas: TypeAlias = Mapping[str, Mapping[str, Any]]
"""Name of each tool -> JSON schema of its arguments."""
_NAME = re.compile(r"[A-Za-z_][\w.\-:/]*")
_HEAD = 256  # characters between an opening marker and the arguments of a call, at most


@dataclass(frozen=True, slots=True)
class Call:
    """A call. arguments: a JSON object as text."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Closed:
    """A region that has ended. calls: none if the text is not a call. size: how many characters of
    the region's text the calls take."""

    calls: Sequence[Call] = ()
    size: int = 0


NOT_A_CALL = Closed()


class Region(Protocol):
    """Text from an opening marker on."""

    def take(self, text: str, final: bool) -> Closed | None:
        """text: the text of the region so far, which may only have grown since the last call, with
        the opening marker. final: nothing follows. None: more text decides; never if ``final``."""
        ...


Body: TypeAlias = Callable[[str, Schemas], "list[Call] | None"]
"""Reads the calls of a text between two tags; None if it has none."""


@dataclass(frozen=True, slots=True)
class Form:
    """How a family writes calls. opening: the marker; with ``bare``, of calls that start the
    message without a marker, their first character. make: begins a region."""

    opening: str
    make: Callable[[Schemas], Region]
    bare: bool = False


def tagged(opening: str, closing: str, *bodies: Body) -> Form:
    """Calls between two tags. A closing tag that is written in an argument does not end the
    call."""
    return Form(opening, lambda schemas: _Tagged(opening, closing, bodies, schemas))


@dataclass(slots=True)
class _Tagged:
    opening: str
    closing: str
    bodies: Sequence[Body]
    schemas: Schemas
    at: int = 0
    failed: bool = False

    def take(self, text: str, final: bool) -> Closed | None:
        self.at = max(self.at, len(self.opening))
        while True:
            end = text.find(self.closing, self.at)
            if self.failed and 0 <= text.find(self.opening, self.at) < (end if end >= 0 else len(text)):
                return NOT_A_CALL
            if end < 0:
                break
            if calls := self._read(text[len(self.opening) : end]):
                return Closed(calls, end + len(self.closing))
            self.failed, self.at = True, end + len(self.closing)
        if not final:
            if not self.failed:
                self.at = max(self.at, len(text) - len(self.closing) + 1)
            return None
        if not self.failed and (calls := self._read(text[len(self.opening) :])):
            return Closed(calls, len(text))  # the closing tag is missing
        return NOT_A_CALL

    def _read(self, body: str) -> list[Call] | None:
        return next((calls for read in self.bodies if (calls := read(body, self.schemas))), None)


def json_body(body: str, _: Schemas) -> list[Call] | None:
    """``{"name": "f", "arguments": {...}}``, or a list of such objects."""
    value = _json(body)
    calls = [_call(each) for each in (value if isinstance(value, list) else [value])]
    return [call for call in calls if call is not None] if calls and None not in calls else None


_XML = re.compile(r"\s*<function=([^>\s]+)>(.*?)(?:</function>)?\s*", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^>]+)>(.*?)</parameter>\s*", re.DOTALL)
_GLM = re.compile(r"\s*([^\s<{]+)\s*((?:<arg_key>.*)?)", re.DOTALL)
_GLM_ARGUMENT = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*", re.DOTALL)


def xml_body(body: str, schemas: Schemas) -> list[Call] | None:
    """``<function=f><parameter=a>1</parameter></function>``, as Qwen3-Coder writes it."""
    if (found := _XML.fullmatch(body)) is None:
        return None
    return _with_values(found.group(1), found.group(2), _PARAMETER, schemas)


def glm_body(body: str, schemas: Schemas) -> list[Call] | None:
    """``f<arg_key>a</arg_key><arg_value>1</arg_value>``, as GLM 4 writes it."""
    if (found := _GLM.fullmatch(body)) is None:
        return None
    return _with_values(found.group(1), found.group(2), _GLM_ARGUMENT, schemas)


_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
_DEEPSEEK = re.compile(
    r"\s*<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>(?P<old>[^\n<]+)\n```json\n(?P<fenced>.*?)\n```"
    r"|(?P<new>[^\n<]+)<｜tool▁sep｜>(?P<plain>.*?))\s*<｜tool▁call▁end｜>\s*",
    re.DOTALL,
)


def deepseek_body(body: str, _: Schemas) -> list[Call] | None:
    """Calls of DeepSeek V3 and R1 (arguments in a code block) and of V3.1 (arguments alone)."""
    calls: list[Call] = []
    at = 0
    while at < len(body):
        if (found := _DEEPSEEK.match(body, at)) is None:
            return None
        name = found.group("old") or found.group("new")
        call = _call({"name": name.strip(), "arguments": _json(found.group("fenced") or found.group("plain") or "")})
        if call is None:
            return None
        calls.append(call)
        at = found.end()
    return calls or None


_MISTRAL = re.compile(r"\s*([A-Za-z_][\w.\-]*)\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\])?\s*")


@dataclass(slots=True)
class _Mistral:
    """``[TOOL_CALLS][{...}]``, or ``[TOOL_CALLS]f[ARGS]{...}`` for each call."""

    opening: str
    head: str | None = None
    brackets: Brackets | None = None
    start: int = 0

    def take(self, text: str, final: bool) -> Closed | None:
        if self.brackets is None:
            begin = len(self.opening) + len(text[len(self.opening) :]) - len(text[len(self.opening) :].lstrip())
            if text.startswith("[{", begin) or re.match(r"\[\s*[{\]]", text[begin:]):
                self.start = begin
            else:
                self.start = text.find("{", begin, begin + _HEAD)
                if self.start < 0:
                    return NOT_A_CALL if final or len(text) > begin + _HEAD else None
                found = _MISTRAL.fullmatch(text, begin, self.start)
                if found is None:
                    return NOT_A_CALL
                self.head = found.group(1)
            self.brackets = Brackets(self.start)
        if (end := self.brackets.end(text)) is None:
            return NOT_A_CALL if final else None
        value = _json(text[self.start : end])
        calls = [_call({"name": self.head, "arguments": value})] if self.head else json_body(text[self.start : end], {})
        return Closed(calls, end) if calls and calls[0] else NOT_A_CALL  # type: ignore[arg-type]


MISTRAL = Form("[TOOL_CALLS]", lambda _: _Mistral("[TOOL_CALLS]"))

_KEY = re.compile(r'\{\s*"([^"]*)"')
_KEY_SO_FAR = re.compile(r'\{\s*("[^"]*)?')


@dataclass(slots=True)
class _BareJson:
    """A message that is ``{"name": "f", "parameters": {...}}``, as Llama 3 writes it."""

    schemas: Schemas
    opening: str = ""
    brackets: Brackets | None = None

    def take(self, text: str, final: bool) -> Closed | None:
        begin = len(text) - len(text[len(self.opening) :].lstrip())
        if begin == len(text):
            return NOT_A_CALL if final else None
        if self.brackets is None:
            key = _KEY.match(text, begin)
            if key is None:
                waits = not final and _KEY_SO_FAR.fullmatch(text, begin)
                return None if waits else NOT_A_CALL
            if key.group(1) not in ("name", "type", "function"):
                return NOT_A_CALL
            self.brackets = Brackets(begin)
        if (end := self.brackets.end(text)) is None:
            return NOT_A_CALL if final else None
        value = _json(text[begin:end])
        if isinstance(value, Mapping) and isinstance(value.get("function"), Mapping):
            value = value["function"]
        call = _call(value)
        return Closed([call], end) if call is not None and call.name in self.schemas else NOT_A_CALL


BARE_JSON = Form("{", lambda schemas: _BareJson(schemas), bare=True)
PYTHON_TAG = Form("<|python_tag|>", lambda schemas: _BareJson(schemas, "<|python_tag|>"))

_PYTHON = re.compile(r"\[\s*[A-Za-z_][\w.]*\(")
_PYTHON_SO_FAR = re.compile(r"\[\s*([A-Za-z_][\w.]*)?")
_CONSTANTS = {"true": True, "false": False, "null": None}


@dataclass(slots=True)
class _Pythonic:
    """A message that is ``[f(a=1), g(b="x")]``, as Llama 3.2 and 4 write it."""

    schemas: Schemas
    brackets: Brackets | None = None

    def take(self, text: str, final: bool) -> Closed | None:
        if self.brackets is None:
            if _PYTHON.match(text) is None:
                waits = not final and _PYTHON_SO_FAR.fullmatch(text)
                return None if waits else NOT_A_CALL
            self.brackets = Brackets(0, "\"'")
        if (end := self.brackets.end(text)) is None:
            return NOT_A_CALL if final else None
        calls = _python_calls(text[:end])
        return Closed(calls, end) if calls and all(call.name in self.schemas for call in calls) else NOT_A_CALL


PYTHONIC = Form("[", lambda schemas: _Pythonic(schemas), bare=True)


@dataclass(slots=True)
class _Required:
    """A completion that was constrained to a JSON list of calls; each is read when it ends."""

    schemas: Schemas
    brackets: Brackets | None = None
    start: int = 0

    def take(self, text: str, final: bool) -> Closed | None:
        if self.brackets is None:
            found = re.match(r"[\[,\s]*", text)
            self.start = found.end() if found else 0
            if self.start == len(text):
                return NOT_A_CALL if final else None
            if text[self.start] != "{":
                return NOT_A_CALL
            self.brackets = Brackets(self.start)
        if (end := self.brackets.end(text)) is None:
            return NOT_A_CALL if final else None
        rest = text[end:].lstrip()
        if not rest and not final:
            return None
        call = _call(_json(text[self.start : end]))
        if call is None:
            return NOT_A_CALL
        return Closed([call], len(text) - len(rest) + 1 if rest.startswith("]") else end)


REQUIRED = (
    Form("[", lambda schemas: _Required(schemas), bare=True),
    Form(",", lambda schemas: _Required(schemas), bare=True),
)


def _call(value: Any) -> Call | None:
    """The call of an object; None if it is not one."""
    if not isinstance(value, Mapping) or not isinstance(name := value.get("name"), str) or not _NAME.fullmatch(name):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = _json(arguments)
    return Call(name, _text(arguments)) if isinstance(arguments, Mapping) else None


def _with_values(name: str, text: str, pattern: re.Pattern[str], schemas: Schemas) -> list[Call] | None:
    """The call of a text of names and values, which are texts or JSON as the schema says."""
    if not _NAME.fullmatch(name):
        return None
    properties = schemas.get(name, {}).get("properties", {})
    values: dict[str, Any] = {}
    at = 0
    while at < len(text.rstrip()):
        if (found := pattern.match(text, at)) is None:
            return None
        key = found.group(1).strip()
        values[key] = _value(found.group(2).removeprefix("\n").removesuffix("\n"), properties.get(key, {}))
        at = found.end()
    return [Call(name, _text(values))]


def _value(text: str, schema: Any) -> Any:
    types = _types(schema)
    if not types or ("string" in types and not ("null" in types and text.strip() == "null")):
        return text
    found = _json(_PYTHON_WORDS.get(text.strip(), text))
    return text if found is _FAILED else found


def _types(schema: Any) -> set[str]:
    if not isinstance(schema, Mapping):
        return set()
    given = schema.get("type", ())
    found = {given} if isinstance(given, str) else set(given)
    for alternatives in ("anyOf", "oneOf"):
        for each in schema.get(alternatives, ()):
            found |= _types(each)
    return found


class _Failed:
    """The result of a text that is not JSON."""


_FAILED = _Failed()


def _json(text: str) -> Any:
    """The value of a JSON text; ``_FAILED`` for any other."""
    try:
        value = json.loads(text)
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        return _FAILED
    return value


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _python_calls(text: str) -> list[Call]:
    """The calls of a Python list of calls with named literals; none if it is something else."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        nodes = tree.elts if isinstance(tree, ast.List) else []
        return [_python_call(node) for node in nodes]
    except (SyntaxError, ValueError, RecursionError, TypeError, MemoryError):
        return []


def _python_call(node: ast.expr) -> Call:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("not a call with named arguments")
    values: dict[str, Any] = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise ValueError("arguments are unpacked")
        values[keyword.arg] = _literal(keyword.value)
    return Call(ast.unparse(node.func), json.dumps(values, ensure_ascii=False, allow_nan=False))


def _literal(node: ast.expr) -> Any:
    if isinstance(node, ast.Name) and node.id in _CONSTANTS:
        return _CONSTANTS[node.id]
    if isinstance(node, ast.List):
        return [_literal(each) for each in node.elts]
    if isinstance(node, ast.Dict):
        return {ast.literal_eval(key): _literal(value) for key, value in zip(node.keys, node.values, strict=True) if key}
    return ast.literal_eval(node)
