"""Compares the messages of a client with those of a session.

Clients return an assistant's message without its thinking, with the arguments of its tool calls
serialized again, or with other whitespace at its ends. Such a message is still the same message.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

Message: TypeAlias = Mapping[str, Any]
"""A chat message as in OpenAI's API: `role`, `content`, and for tools `tool_calls` or
`tool_call_id`."""

_THINK_END = "</think>"
_THINK = re.compile(r"^\s*<think>.*", re.DOTALL)
_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Canonical:
    """A message as it is compared: ``calls`` are the name and the sorted JSON arguments of each
    tool call."""

    role: str
    text: str
    calls: tuple[tuple[str, str], ...] = ()


def canonical(message: Message) -> Canonical:
    """The comparable form of a message. Only the ends of the text lose whitespace; its lines keep
    their indentation."""
    role, text = str(message.get("role", "")), text_of(message)
    if role == "developer":
        role = "system"
    if role == "assistant":
        return _assistant(text, message.get("tool_calls") or ())
    text = _trimmed(text)
    return Canonical(role, _sorted_json(text) if role == "tool" else text)


def text_of(message: Message) -> str:
    """The text of a message, whose content is a string, a list of parts, or absent."""
    content = message.get("content")
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        return "".join(_part(part) for part in content)
    return str(content)


def assistant_message(text: str) -> Message:
    """What a sampled text says, for the chat template: content without thinking, and tool calls."""
    content, calls = _split_calls(_without_thinking(text))
    message: dict[str, Any] = {"role": "assistant", "content": content.strip()}
    if calls:
        message["tool_calls"] = [
            {"id": f"call_{at}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for at, (name, arguments) in enumerate(calls)
        ]
    return message


def _assistant(text: str, explicit: Sequence[Any]) -> Canonical:
    content, written = _split_calls(_without_thinking(text))
    calls = [*written, *((_field(call, "name"), _field(call, "arguments")) for call in explicit)]
    return Canonical("assistant", _trimmed(content), tuple((str(name), _sorted_json(arguments)) for name, arguments in calls))


def _part(part: Any) -> str:
    if isinstance(part, str):
        return part
    return str(part.get("text") or "") if isinstance(part, Mapping) else str(part)


def _without_thinking(text: str) -> str:
    """The text after the thinking, which the prompt may have begun; nothing if it never ended."""
    _, ended, rest = text.rpartition(_THINK_END)
    return rest if ended else _THINK.sub("", text)


def _split_calls(text: str) -> tuple[str, list[tuple[str, Any]]]:
    """The text without the tool calls that are written in it, and their names and arguments. A call
    that is not JSON stays text."""
    calls: list[tuple[str, Any]] = []

    def take(match: re.Match[str]) -> str:
        call = _json(match.group(1))
        if not isinstance(call, Mapping) or not isinstance(call.get("name"), str):
            return match.group(0)
        calls.append((call["name"], call.get("arguments", call.get("parameters", {}))))
        return ""

    left = _CALL.sub(take, text)
    if not calls and isinstance(call := _json(text), Mapping) and isinstance(call.get("name"), str):
        arguments = call.get("arguments", call.get("parameters"))  # the whole text is a call, as Llama 3 writes one
        if isinstance(arguments, Mapping):
            return "", [(call["name"], arguments)]
    return left, calls


def _field(call: Any, name: str) -> Any:
    function = call.get("function", call) if isinstance(call, Mapping) else {}
    return function.get(name, "") if isinstance(function, Mapping) else ""


def _sorted_json(value: Any) -> str:
    """An object or a list as JSON with sorted keys, also if ``value`` is its text; other texts as
    they are."""
    found = _json(value) if isinstance(value, str) else value
    if isinstance(found, Mapping | list):
        return json.dumps(found, sort_keys=True, ensure_ascii=False, default=str)
    return _trimmed(value) if isinstance(value, str) else json.dumps(value, default=str)


def _json(text: str) -> Any:
    stripped = text.strip()
    if not stripped.startswith(("{", "[")):
        return None
    try:
        return json.loads(stripped)
    except ValueError:
        return None


def _trimmed(text: str) -> str:
    return text.replace("\r\n", "\n").strip()
