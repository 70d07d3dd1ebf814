"""The fast check of a request agrees with the full validation."""

from __future__ import annotations

import random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from rollout.inference.v1 import inference_pb2
from rollout.learner.v1 import learner_pb2
from rollout_workers.worker.validation import _fast_check, _message

_TEXTS = ("", "a", "run-01", "blake3-" + "0" * 64, "x" * 300)
_NUMBERS = (0, 1, 7, 2**31 - 1)
_REALS = (0.0, 0.5, 1.0, -1.0, 3.0, float("nan"), float("inf"))


def fill(message: Message, rng: random.Random, depth: int = 0) -> None:
    """Set some fields to random values, half of them invalid."""
    for field in message.DESCRIPTOR.fields:
        if rng.random() < 0.25 or depth > 4:
            continue
        if field.is_repeated:
            if field.message_type is not None and field.message_type.GetOptions().map_entry:
                continue
            for _ in range(rng.randrange(3)):
                if field.message_type is not None:
                    fill(getattr(message, field.name).add(), rng, depth + 1)
                else:
                    getattr(message, field.name).append(value(field, rng))
        elif field.message_type is not None:
            getattr(message, field.name).SetInParent()
            fill(getattr(message, field.name), rng, depth + 1)
        else:
            setattr(message, field.name, value(field, rng))


def value(field: FieldDescriptor, rng: random.Random) -> Any:
    if field.enum_type is not None:
        return rng.choice(field.enum_type.values).number
    kind = field.cpp_type
    if kind == FieldDescriptor.CPPTYPE_STRING:
        text = rng.choice(_TEXTS)
        return text.encode() if field.type == FieldDescriptor.TYPE_BYTES else text
    if kind in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
        return rng.choice(_REALS)
    return rng.random() < 0.5 if kind == FieldDescriptor.CPPTYPE_BOOL else rng.choice(_NUMBERS)


def test_the_fast_check_agrees_with_the_full_validation() -> None:
    rng = random.Random(0)
    seen = {True: 0, False: 0}
    for module in (inference_pb2, learner_pb2):
        for descriptor in module.DESCRIPTOR.message_types_by_name.values():
            kind = getattr(module, descriptor.name)
            for _ in range(40):
                request = kind()
                fill(request, rng)
                broken = list(_message(request, ""))
                assert _fast_check(descriptor)(request) == (not broken), (broken, request)
                seen[not broken] += 1
    assert min(seen.values()) > 300, seen
