"""Write docs/reference/config.md from the JSON Schema of the run config.

One section a table of the TOML file, in the order of the contract; one line a key: its type, its default,
what it may be, what it means.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SCHEMA = ROOT / "schemas" / "run_config.schema.json"
TARGET = ROOT / "docs" / "reference" / "config.md"
HEADER = """# The run config

<!-- Generated from proto/rollout/config/v1/run_config.proto by `make docs`. Change it there. -->

{summary}

Bold keys must be given. Editors complete and check a config that starts with
`#:schema <path to>/schemas/run_config.schema.json`; `rollout validate --config FILE` checks everything, cross-field
rules included.
"""

Schema = dict[str, Any]


def main() -> None:
    schema = json.loads(SCHEMA.read_text())
    sections = list(describe_table("", schema, schema["definitions"]))
    TARGET.parent.mkdir(parents=True, exist_ok=True)
    TARGET.write_text("\n".join([HEADER.format(summary=schema["description"]), *sections]))


def describe_table(name: str, table: Schema, definitions: Schema) -> Iterator[str]:
    """Yield the section of one table, then those of the tables in it."""
    keys = {key: field for key, field in table["properties"].items() if "allOf" not in field}
    tables = {key: definitions[reference(field)] for key, field in table["properties"].items() if "allOf" in field}
    if name:
        yield f"## `[{name}]`\n\n{table['description']}\n"
    if keys:
        required = table.get("required", [])
        yield "| key | type | default | range | meaning |\n|---|---|---|---|---|"
        yield "\n".join(describe_key(key, field, key in required) for key, field in keys.items()) + "\n"
    for key, inner in tables.items():
        yield from describe_table(f"{name}.{key}" if name else key, inner, definitions)


def describe_key(key: str, field: Schema, required: bool) -> str:
    label = f"**`{key}`**" if required else f"`{key}`"
    default = f"`{toml(field['default'])}`" if "default" in field else ""
    meaning = field["description"].replace("|", "\\|").replace("\n\n", "<br>")
    if examples := field.get("examples"):
        meaning += f" For example `{toml(examples[0])}`."
    return f"| {label} | {type_name(field)} | {default} | {limits(field)} | {meaning} |"


def type_name(field: Schema) -> str:
    if field["type"] == "array":
        return f"list of {type_name(field['items'])}s"
    return "float" if field["type"] == "number" else str(field["type"])


def limits(field: Schema) -> str:
    """What the value may be, in words; empty where the type says it all."""
    if "enum" in field:
        return ", ".join(f"`{toml(value)}`" for value in field["enum"])
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    parts = [f"{sign} {field[key]}" for key, sign in signs.items() if key in field]
    if "pattern" in field:
        parts.append(f"`{field['pattern']}`".replace("|", "\\|"))
    if "maxItems" in field:
        parts.append(f"at most {field['maxItems']}")
    return ", ".join(parts)


def reference(field: Schema) -> str:
    return str(field["allOf"][0]["$ref"]).removeprefix("#/definitions/")


def toml(value: object) -> str:
    """Write a value as TOML does; JSON differs only for small floats, which Python spells as TOML does too."""
    return repr(value) if isinstance(value, float) else json.dumps(value, ensure_ascii=False)


if __name__ == "__main__":
    main()
