"""The traits of algorithms, which say what an algorithm needs from the workers. They are options in
the contract (``option (algorithm)`` in algorithm.proto)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from rollout.config.v1 import options_pb2
from rollout.config.v1.algorithm_pb2 import AlgorithmConfig
from rollout.config.v1.options_pb2 import AlgorithmTraits
from rollout.config.v1.run_config_pb2 import EnvironmentConfig, RunConfig

NAMES = tuple(field.name for field in AlgorithmConfig.DESCRIPTOR.fields)


def name_of(config: RunConfig) -> str:
    """The name of the chosen table, such as ``grpo``."""
    return str(config.algorithm.WhichOneof("kind"))


def traits(name: str) -> AlgorithmTraits:
    """The traits of an algorithm by the name of its table. Raises ``KeyError`` for an unknown
    name."""
    return table_of(name).GetOptions().Extensions[options_pb2.algorithm]


def table_of(name: str) -> Descriptor:
    """The message of an algorithm's table. Raises ``KeyError`` for an unknown name."""
    return _message(AlgorithmConfig.DESCRIPTOR.fields_by_name[name])


def samples(name: str) -> bool:
    """Whether the training tokens are sampled from the policy instead of read from rows."""
    return traits(name).rows == options_pb2.ROW_KIND_PROMPT


def has_inference_workers(config: RunConfig) -> bool:
    """Whether a run samples completions, for training or for evaluations with a reward, so that it
    has inference workers. Go decides the same (``libs/algorithm``)."""
    return samples(name_of(config)) or (config.eval.every_steps > 0 and config.HasField("reward"))


def rewarded(config: RunConfig) -> bool:
    """Whether workers score what the policy samples, with the reward or in the environment."""
    if config.HasField("reward") or config.HasField("multistep"):
        return True
    kind = EnvironmentConfig.DESCRIPTOR.fields_by_name["kind"]
    return config.environment.kind in kind.GetOptions().Extensions[options_pb2.meta].rewarding


def turns(config: RunConfig) -> bool:
    """Whether episodes may have several turns, played by the workers."""
    return config.environment.kind not in ("", "single_turn", "external")


def keys_of(table: Descriptor) -> Iterator[FieldDescriptor]:
    """The keys of a TOML table: the fields of its message and those of the messages that it
    inlines."""
    for field in table.fields:
        if field.GetOptions().Extensions[options_pb2.meta].inline:
            yield from _message(field).fields
        else:
            yield field


def settings_of(table: Message) -> dict[str, Any]:
    """The keys that are set in a table, by name, including those of inlined messages."""
    found: dict[str, Any] = {}
    for field, value in table.ListFields():
        if field.GetOptions().Extensions[options_pb2.meta].inline:
            found |= {inner.name: inner_value for inner, inner_value in value.ListFields()}
        else:
            found[field.name] = value
    return found


def _message(field: FieldDescriptor) -> Descriptor:
    assert field.message_type is not None, f"{field.full_name} is not a table"
    return field.message_type
