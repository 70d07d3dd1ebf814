"""Convert protoc-gen-jsonschema's bundle of the run config to a schema for TOML editors.

The bundle has types and ranges. The descriptor of the same message has the order of the fields, the
required fields, defaults and examples, and the tables that exclude each other. Together they become
one self-contained draft-07 schema, which is the draft that TOML editors support. A reference is
wrapped in `allOf`, so that the field's own description is used.
"""

from __future__ import annotations

import tomllib
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor, OneofDescriptor

from buf.validate import validate_pb2
from rollout.algorithm import keys_of
from rollout.config.v1 import options_pb2, run_config_pb2

Schema = dict[str, Any]

DRAFT = "http://json-schema.org/draft-07/schema#"
# A constraint that only repeats the range of a float or a 32-bit integer is useless to readers.
TYPE_BOUNDS = {
    "minimum": (-3.4028234663852886e38,),
    "maximum": (3.4028234663852886e38, 4294967295),
    "exclusiveMaximum": (4294967296,),
}


def shape(bundle: Schema, root: Descriptor = run_config_pb2.RunConfig.DESCRIPTOR) -> Schema:
    """Return the schema of root; every message below it is a definition under its short name."""
    definitions: dict[str, Schema] = {}
    pending = [root]
    while pending:
        message = pending.pop()
        if message.name not in definitions:
            definitions[message.name] = shape_message(message, bundle["$defs"])
            pending += [table for field in keys_of(message) if (table := table_of(field)) is not None]
    top = definitions.pop(root.name)
    return {"$schema": DRAFT, **top, "definitions": dict(sorted(definitions.items()))}


def shape_message(message: Descriptor, sources: Schema) -> Schema:
    defaults = message.GetOptions().Extensions[options_pb2.algorithm].defaults
    properties = {}
    for field in keys_of(message):  # of the message, or of an inlined message
        owner = field.containing_type or message
        source = source_of(owner, sources)["properties"][field.name]
        properties[field.name] = shape_field(field, source, defaults.get(field.name, ""))
    shaped: Schema = {"description": text(source_of(message, sources)), "type": "object", "properties": properties}
    if required := [field.name for field in message.fields if is_required(field)]:
        shaped["required"] = required
    if choices := [exactly_one(names) for names in choices_of(message)]:
        shaped["allOf"] = choices
    shaped["additionalProperties"] = False
    return shaped


def source_of(message: Descriptor, sources: Schema) -> Schema:
    return sources[f"{message.full_name}.schema.strict.json"]


def shape_field(field: FieldDescriptor, source: Schema, default: str = "") -> Schema:
    shaped: Schema = {"description": text(source)}
    meta = field.GetOptions().Extensions[options_pb2.meta]
    table = table_of(field)
    if table is not None:
        target = {"allOf": [{"$ref": f"#/definitions/{table.name}"}]}
        if is_map(field):
            pattern = field.GetOptions().Extensions[validate_pb2.field].map.keys.string.pattern
            shaped |= {"type": "object", "propertyNames": {"pattern": pattern}, "additionalProperties": target}
        else:
            shaped |= {"type": "array", "items": target} if field.is_repeated else target
    elif meta.json:
        shaped |= {"type": "object"}
    else:
        shaped |= {key: value for key, value in scalar(source).items() if informs(key, value)}
    if default or meta.default:
        shaped["default"] = toml_value(default or meta.default)
    if meta.example:
        shaped["examples"] = [toml_value(meta.example)]
    return shaped


def is_map(field: FieldDescriptor) -> bool:
    """Whether the field has tables with names that the user chooses."""
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def table_of(field: FieldDescriptor) -> Descriptor | None:
    """The message of a table, or of each table of a map; None for a value."""
    message = field.message_type
    return message.fields_by_name["value"].message_type if message is not None and is_map(field) else message


def scalar(source: Schema) -> Schema:
    """The number type of a float that may be infinite. JSON writes infinity as a string, TOML does
    not."""
    return next((option for option in source.get("anyOf", []) if option["type"] == "number"), source)


def is_required(field: FieldDescriptor) -> bool:
    return field.GetOptions().Extensions[validate_pb2.field].required


def choices_of(message: Descriptor) -> list[list[str]]:
    """Return the sets of keys of which a table has exactly one: those of a required oneof, and
    those that share a choice."""
    shared: dict[str, list[str]] = {}
    for field in keys_of(message):
        if choice := field.GetOptions().Extensions[options_pb2.meta].choice:
            shared.setdefault(choice, []).append(field.name)
    oneofs = [[field.name for field in oneof.fields] for oneof in message.oneofs if must_choose(oneof)]
    return [*oneofs, *shared.values()]


def must_choose(oneof: OneofDescriptor) -> bool:
    return oneof.GetOptions().Extensions[validate_pb2.oneof].required


def exactly_one(names: list[str]) -> Schema:
    return {"oneOf": [{"required": [name]} for name in names]}


def informs(key: str, value: object) -> bool:
    return key not in ("title", "description") and value not in TYPE_BOUNDS.get(key, ())


def text(source: Schema) -> str:
    """The comment with one paragraph per blank line. Line breaks and indentation of the source are
    dropped."""
    paragraphs = source.get("description", "").split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


def toml_value(written: str) -> object:
    return tomllib.loads(f"value = {written}")["value"]
