"""Functions of reward expressions in addition to those of CEL."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, cast

_NUMBER = re.compile(r"[-+]?(?:\d+(?:,\d{3})*(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?")


def _trim(text: str) -> str:
    return text.strip()


def _lower(text: str) -> str:
    return text.lower()


def _upper(text: str) -> str:
    return text.upper()


def _replace(text: str, old: str, new: str) -> str:
    return text.replace(old, new)


def _split(text: str, separator: str) -> list[str]:
    return text.split(separator)


def _index_of(text: str, part: str) -> int:
    return text.find(part)


def _number(text: str, otherwise: Any) -> Any:
    """The text as a number; ``otherwise`` if it is not a number."""
    match = _NUMBER.fullmatch(text.strip())
    return float(match[0].replace(",", "")) if match else otherwise


def _last_number(text: str, otherwise: Any) -> Any:
    """The last number in the text; ``otherwise`` without one."""
    found = _NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else otherwise


def _least(one: Any, other: Any) -> Any:
    return min(one, other)


def _greatest(one: Any, other: Any) -> Any:
    return max(one, other)


def _absolute(value: Any) -> Any:
    return abs(value)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "trim": _trim,
    "lowerAscii": _lower,
    "upperAscii": _upper,
    "replace": _replace,
    "split": _split,
    "indexOf": _index_of,
    "number": _number,
    "lastNumber": _last_number,
    "abs": _absolute,
    "least": _least,
    "greatest": _greatest,
}


def celled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with a result of a CEL type."""
    from celpy import celtypes

    types: Any = celtypes

    def call(*arguments: Any) -> Any:
        value = function(*arguments)
        if isinstance(value, list):
            items = cast(list[str], value)
            return types.ListType([types.StringType(item) for item in items])
        if isinstance(value, str):
            return types.StringType(value)
        if isinstance(value, float):
            return types.DoubleType(value)
        return types.IntType(value) if isinstance(value, int) else value

    return call
