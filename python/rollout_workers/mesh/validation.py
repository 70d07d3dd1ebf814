"""Checks a request against the ``buf.validate`` rules in its contract, and names every field that breaks one.

Understands the rules that the contracts use on requests of workers: required, oneof required, string min_len, max_len, in and
pattern, bytes and repeated sizes, numeric bounds, enum defined_only and not_in, and the rules of messages inside.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor
from google.protobuf.message import Message

from buf.validate import validate_pb2
from rollout_workers.mesh.status import InvalidRequest

Violation = tuple[str, str]
Check = Callable[[Any], str | None]  # a value -> what is wrong with it

_NUMBERS = ("float", "double", "int32", "int64", "uint32", "uint64", "fixed32", "fixed64", "sint32", "sint64")


def validate(request: Message) -> None:
    """Raises :class:`InvalidRequest` with every violation."""
    violations = list(_message(request, ""))
    if violations:
        told = "; ".join(f"{path}: {what}" for path, what in violations[:3])
        more = f" and {len(violations) - 3} more" if len(violations) > 3 else ""
        raise InvalidRequest(f"invalid {type(request).__name__}: {told}{more}", violations=violations)


def _message(message: Message, path: str) -> Iterator[Violation]:
    for visit in _rules(message.DESCRIPTOR):
        yield from visit(message, path)


@cache
def _ruled(descriptor: Descriptor) -> bool:
    """Whether a rule stands on a message type or on any that it holds. Those without are not walked: a batch has thousands."""
    seen: set[str] = set()
    waiting = [descriptor]
    while waiting:
        this = waiting.pop()
        if this.full_name in seen:
            continue
        seen.add(this.full_name)
        if any(_oneof_required(oneof) for oneof in this.oneofs):
            return True
        for field in this.fields:
            if _field_ruled(field):
                return True
            if field.message_type is not None:
                waiting.append(field.message_type)
    return False


def _field_ruled(field: FieldDescriptor) -> bool:
    return field.GetOptions().HasExtension(validate_pb2.field)  # type: ignore[arg-type]


@cache
def _rules(descriptor: Descriptor) -> tuple[Callable[[Message, str], Iterator[Violation]], ...]:
    """The visitors of a message type."""
    visits = [_oneof_visit(oneof.name) for oneof in descriptor.oneofs if _oneof_required(oneof)]
    for field in descriptor.fields:
        if _field_ruled(field) or (field.message_type is not None and _ruled(field.message_type)):
            rules = field.GetOptions().Extensions[validate_pb2.field]  # type: ignore[index]
            visits.append(_field_visit(field, rules))
    return tuple(visits)


def _oneof_required(oneof: Any) -> bool:
    return bool(oneof.GetOptions().Extensions[validate_pb2.oneof].required)


def _oneof_visit(name: str) -> Callable[[Message, str], Iterator[Violation]]:
    def visit(message: Message, path: str) -> Iterator[Violation]:
        if message.WhichOneof(name) is None:
            choices = ", ".join(f.name for f in message.DESCRIPTOR.oneofs_by_name[name].fields)
            yield _join(path, name), f"one of {choices} must be set"

    return visit


def _field_visit(field: FieldDescriptor, rules: Any) -> Callable[[Message, str], Iterator[Violation]]:
    repeated = bool(field.is_repeated)
    is_map = repeated and field.message_type is not None and field.message_type.GetOptions().map_entry
    nested = field.message_type is not None and not is_map and _ruled(field.message_type)
    own = [] if repeated else _checks(field, rules)
    items = _checks(field, rules.repeated.items) if repeated and rules.HasField("repeated") else []

    def visit(message: Message, path: str) -> Iterator[Violation]:
        here = _join(path, field.name)
        value = getattr(message, field.name)
        if repeated:
            if rules.HasField("repeated"):
                yield from _size(rules.repeated, "items", len(value), here)
            if items or nested:
                for index, item in enumerate(value):
                    at = f"{here}[{index}]"
                    yield from ((at, what) for check in items if (what := check(item)))
                    if nested:
                        yield from _message(item, at)
            return
        present = message.HasField(field.name) if field.has_presence else True
        if rules.required and (not present or (not field.has_presence and value == field.default_value)):
            yield here, "must be set"
            return
        if present:
            yield from ((here, what) for check in own if (what := check(value)))
            if nested:
                yield from _message(value, here)

    return visit


def _checks(field: FieldDescriptor, rules: Any) -> list[Check]:
    kind = rules.WhichOneof("type")
    if kind == "string":
        return _text(rules.string)
    if kind == "bytes":
        return [lambda value, r=rules.bytes: _first(_size(r, "len", len(value), ""))]
    if kind == "enum" and field.enum_type is not None:
        return _enum(field.enum_type, rules.enum)
    if kind in _NUMBERS:
        return _number(getattr(rules, kind))
    return []


def _text(rules: Any) -> list[Check]:
    checks: list[Check] = [lambda value: _first(_size(rules, "len", len(value), ""))]
    if len(getattr(rules, "in")):
        allowed = tuple(getattr(rules, "in"))
        checks.append(lambda value: None if value in allowed else f"must be one of {', '.join(allowed)}")
    if rules.pattern:
        pattern = re.compile(rules.pattern)
        checks.append(lambda value: None if pattern.search(value) else f"must match {rules.pattern}")
    return checks


def _enum(descriptor: EnumDescriptor, rules: Any) -> list[Check]:
    def check(value: int) -> str | None:
        if (rules.defined_only and value not in descriptor.values_by_number) or value in rules.not_in:
            return "must be one of the enum's values"
        return None

    return [check]


def _number(rules: Any) -> list[Check]:
    def check(value: float) -> str | None:
        for bound, holds, words in (
            ("gte", lambda b: value >= b, "at least"),
            ("gt", lambda b: value > b, "above"),
            ("lte", lambda b: value <= b, "at most"),
            ("lt", lambda b: value < b, "below"),
        ):
            if rules.HasField(bound) and not holds(getattr(rules, bound)):
                return f"must be {words} {getattr(rules, bound):g}"
        if isinstance(value, float) and getattr(rules, "finite", False) and not math.isfinite(value):
            return "must be finite"
        return None

    return [check]


def _size(rules: Any, unit: str, size: int, path: str) -> Iterator[Violation]:
    least, most = f"min_{unit}", f"max_{unit}"
    what = "items" if unit == "items" else "characters or bytes"
    if rules.HasField(least) and size < getattr(rules, least):
        yield path, f"must have at least {getattr(rules, least)} {what}"
    if rules.HasField(most) and size > getattr(rules, most):
        yield path, f"must have at most {getattr(rules, most)} {what}"


def _first(violations: Iterator[Violation]) -> str | None:
    return next((what for _, what in violations), None)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
