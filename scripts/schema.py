"""Shape protoc-gen-jsonschema's bundles for people who write TOML in an editor.

The plugin writes two bundles of the run config. The strict one has one spelling a value (no numbers
as strings, no camelCase twins) but calls every field without presence required; the lenient one
knows which are. This takes shapes from the first and requirements from the second, and then:

- enum values get the spelling people write: `MODE_SYNC` is `sync`;
- a float is a number (the strict bundle also allows the strings "NaN" and "Infinity");
- references become draft-07 `definitions`, which TOML editors resolve, with each field's own
  description beside the reference;
- text loses the indent that comment lines carry.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

DRAFT = "http://json-schema.org/draft-07/schema#"
IDENTIFIER = "run_config.schema.json"
DURATION = {"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)?s$", "description": "Seconds, for example `30s`."}


def shape(strict: Schema, lenient: Schema) -> Schema:
    """Return one self-contained draft-07 schema of the message that both bundles are of."""
    required = {definition_name(key): value.get("required", []) for key, value in lenient["$defs"].items()}
    definitions: dict[str, Schema] = {}
    for key, value in strict["$defs"].items():
        name = definition_name(key)
        definitions[name] = shape_message(value, required.get(name, []))
    root = definitions.pop(definition_name(strict["$ref"]))
    return {"$schema": DRAFT, "$id": IDENTIFIER, **root, "definitions": dict(sorted(definitions.items()))}


def shape_message(message: Schema, required: list[str]) -> Schema:
    if message.get("format") == "duration":
        return {"title": message["title"], **DURATION}
    shaped: Schema = {"title": message["title"], "description": text(message), "type": "object"}
    shaped["properties"] = {name: shape_field(field) for name, field in message.get("properties", {}).items()}
    if required:
        shaped["required"] = required
    shaped["additionalProperties"] = message.get("additionalProperties", False)
    return {key: value for key, value in shaped.items() if value != ""}


def shape_field(field: Schema) -> Schema:
    """Shape one field, or the items of a list or map."""
    if "$ref" in field:
        return describe(field, {"allOf": [{"$ref": f"#/definitions/{definition_name(field['$ref'])}"}]})
    if "anyOf" in field:
        number = next(option for option in field["anyOf"] if option.get("type") == "number")
        return describe(field, float_bounds(number))
    shaped = {key: value for key, value in float_bounds(field).items() if key not in ("title", "propertyNames")}
    if "enum" in field and "title" in field:
        shaped["enum"] = spell(field["enum"])
    for inner in ("items", "additionalProperties"):
        if isinstance(field.get(inner), dict):
            shaped[inner] = shape_field(field[inner])
    return describe(field, shaped)


def describe(field: Schema, shaped: Schema) -> Schema:
    shaped.pop("description", None)
    return {"description": text(field), **shaped} if text(field) else shaped


def text(schema: Schema) -> str:
    lines = [line.strip() for line in schema.get("description", "").splitlines()]
    return "\n".join(lines).strip()


def float_bounds(number: Schema) -> Schema:
    """Drop the bounds that only repeat the range of a 32-bit float."""
    limits = {"minimum": -3.4028234663852886e38, "maximum": 3.4028234663852886e38}
    return {key: value for key, value in number.items() if limits.get(key) != value}


def spell(values: list[str]) -> list[str]:
    """Turn MODE_UNSPECIFIED, MODE_SYNC, MODE_ASYNC into sync, async: how a config spells them."""
    prefix = next((value.removesuffix("UNSPECIFIED") for value in values if value.endswith("_UNSPECIFIED")), "")
    return [value.removeprefix(prefix).lower() for value in values if not value.endswith("_UNSPECIFIED")]


def definition_name(reference: str) -> str:
    """`#/$defs/rollout.config.v1.Model.schema.strict.json` -> `Model`."""
    name = reference.removeprefix("#/$defs/").removesuffix(".json").removesuffix(".strict").removesuffix(".schema")
    return name.removeprefix("rollout.config.v1.").removeprefix("google.protobuf.")
