"""The JSON schema of a Python function, which tells the policy how to call it."""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from rollout.errors import RolloutError

_SIMPLE: dict[Any, str] = {str: "string", int: "integer", float: "number", bool: "boolean", dict: "object", list: "array"}
_PARAMETER = re.compile(r"^\s*(?::param )?(\w+)(?: \([^)]*\))?:\s+(.+)$")


class ToolInvalid(RolloutError):
    """A function can't be described to the policy."""

    reason = "TOOL_INVALID"


def function_schema(function: Callable[..., Any], name: str = "") -> dict[str, Any]:
    """A function as an entry of ``tools`` in OpenAI's API. Its docstring describes it, and in lines
    ``name: text`` its parameters. Every parameter needs a type. Raises ``ToolInvalid``."""
    name = name or getattr(function, "__name__", "tool")
    described = inspect.getdoc(function) or ""
    if not described:
        raise ToolInvalid(f"the tool `{name}` has no docstring", fix="describe in it what the tool does, for the policy")
    try:
        hints = get_type_hints(function)
    except NameError as error:
        raise ToolInvalid(f"the tool `{name}` has a type that is not defined: {error}", fix="import it in its file") from error
    parameters = inspect.signature(function).parameters.values()
    texts = {found[1]: found[2] for line in described.splitlines() if (found := _PARAMETER.match(line))}
    properties: dict[str, Any] = {}
    for parameter in parameters:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise ToolInvalid(f"the tool `{name}` takes `{parameter}`", fix="give each parameter a name and a type")
        if parameter.name not in hints:
            raise ToolInvalid(f"parameter `{parameter.name}` of the tool `{name}` has no type", fix="annotate it, as in `x: int`")
        properties[parameter.name] = _schema(hints[parameter.name], f"`{parameter.name}` of the tool `{name}`")
        if parameter.name in texts:
            properties[parameter.name]["description"] = texts[parameter.name]
    lines = [line for line in described.splitlines() if not ((found := _PARAMETER.match(line)) and found[1] in properties)]
    required = [p.name for p in parameters if p.default is p.empty]
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": "\n".join(lines).strip(),
            "parameters": {"type": "object", "properties": properties, "required": required, "additionalProperties": False},
        },
    }


def _schema(hint: Any, of: str) -> dict[str, Any]:
    if hint is Any:
        return {}
    if hint in _SIMPLE:
        return {"type": _SIMPLE[hint]}
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Literal:
        return {"enum": list(inner)}
    if origin in (Union, types.UnionType):
        some = [_schema(each, of) for each in inner if each is not type(None)]
        return some[0] if len(some) == 1 else {"anyOf": some}
    if origin in (list, Sequence) and len(inner) == 1:
        return {"type": "array", "items": _schema(inner[0], of)}
    if origin in (dict, Mapping) and len(inner) == 2 and inner[0] is str:
        return {"type": "object", "additionalProperties": _schema(inner[1], of)}
    written = hint.__qualname__ if isinstance(hint, type) else hint
    raise ToolInvalid(
        f"{of} has the type {written}, which has no JSON schema",
        fix="use str, int, float, bool, list, dict, Literal, or a union of them",
    )
