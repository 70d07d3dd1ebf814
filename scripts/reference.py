"""Write docs/reference/: config.md from the JSON Schema of the run config, cli.md from the commands
of bin/rollout. Write the tables of docs/migrating.md from the names in foreign.toml.

config.md has one section per table of the TOML file, in the order of the contract, with one line
per key: type, default, range, and meaning. cli.md has one section per command.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SCHEMA = ROOT / "schemas" / "run_config.schema.json"
DEFAULTS = ROOT / "schemas" / "golden" / "algorithm_defaults.txt"
FOREIGN = ROOT / "services" / "planner" / "config" / "foreign.toml"
TARGET = ROOT / "docs" / "reference"
MIGRATING = ROOT / "docs" / "migrating.md"
CLI_HEADER = """# The command line

<!-- Generated from bin/rollout by `make docs`. Change the commands in cmd/internal/command. -->

Every command also accepts the options of `rollout` itself.
"""
CONFIG_HEADER = """# The run config

<!-- Generated from proto/rollout/config/v1/run_config.proto by `make docs`. Change it there. -->

{summary}

Bold keys must be given. Editors complete and check a config that starts with
`#:schema <path to>/schemas/run_config.schema.json`; `rollout validate --config FILE` checks everything, cross-field
rules included.
"""

Schema = dict[str, Any]


def main() -> None:
    TARGET.mkdir(parents=True, exist_ok=True)
    schema = json.loads(SCHEMA.read_text())
    sections = list(describe_table("", schema, schema["definitions"]))
    text = [CONFIG_HEADER.format(summary=schema["description"]), *sections, *describe_defaults()]
    (TARGET / "config.md").write_text("\n".join(text))
    names = tomllib.loads(FOREIGN.read_text())
    MIGRATING.write_text(
        re.sub(
            r"(<!-- names: (\w+) -->\n).*?(<!-- end -->)",
            lambda match: match[1] + describe_names(names[match[2]]) + match[3],
            MIGRATING.read_text(),
            flags=re.DOTALL,
        )
    )
    (TARGET / "cli.md").write_text("\n".join([CLI_HEADER, *describe_commands()]))


def describe_commands() -> Iterator[str]:
    """Yield one section per command, from the pages that the program writes."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([ROOT / "bin" / "rollout", "docs", "--dir", folder, "--format", "json"], check=True)
        for page in sorted(Path(folder).glob("*.md"), key=lambda path: path.stem):
            if not page.stem.startswith("rollout_completion_"):
                yield describe_command(page.read_text())


def describe_command(page: str) -> str:
    """Remove the parts that all pages share: the common options and the links."""
    page = re.sub(r"### (Options inherited from parent commands|SEE ALSO)\n.*?(?=\n### |\Z)", "", page, flags=re.DOTALL)
    page = re.sub(r"^## (.+)$", r"## `\1`", page, count=1, flags=re.MULTILINE)
    page = page.replace("### Synopsis\n\n", "").replace(str(Path.home()), "~")
    return re.sub(r"\n{3,}", "\n\n", page).strip() + "\n"


def describe_table(name: str, table: Schema, definitions: Schema) -> Iterator[str]:
    """Yield the section of one table, then those of its subtables."""
    properties: dict[str, Schema] = table["properties"]
    inner_of = {key: of_table(field) for key, field in properties.items()}
    keys = {key: field for key, field in properties.items() if inner_of[key] is None}
    tables = {
        f"{key}.NAME" if "additionalProperties" in properties[key] else key: definitions[reference(inner)]
        for key, inner in inner_of.items()
        if inner is not None
    }
    if name:
        yield f"## `[{name}]`\n\n{table['description']}\n"
    if keys:
        required = table.get("required", [])
        yield "| key | type | default | range | meaning |\n|---|---|---|---|---|"
        yield "\n".join(describe_key(key, field, key in required) for key, field in keys.items()) + "\n"
    for key, inner in tables.items():
        yield from describe_table(f"{name}.{key}" if name else key, inner, definitions)


def describe_defaults() -> Iterator[str]:
    """Yield the section of the defaults that depend on the algorithm, from the golden table."""
    columns, *rows = [line.split() for line in DEFAULTS.read_text().split("\n\n")[2].splitlines() if line[0] != "#"]
    yield "## Defaults by algorithm\n\nDefaults of keys outside of `[algorithm]`. The sources are in"
    yield "`proto/rollout/config/v1/algorithm.proto`.\n"
    yield "| key | algorithm | default | with `[lora]` |\n|---|---|---|---|"
    for key, *cells in rows:
        by_default: dict[str, list[str]] = {}
        for name, cell in zip(columns[1:], cells, strict=True):
            by_default.setdefault(cell, []).append(f"`{name}`")
        for cell, names in by_default.items():
            full, adapters = cell.split("|")
            yield f"| `{key}` | {', '.join(names)} | `{full}` | `{adapters}` |"
    yield ""


def describe_names(names: dict[str, dict[str, str]]) -> str:
    """The table of another trainer's names."""
    lines = ["| there | here | how the value translates |", "|---|---|---|"]
    for name, entry in sorted(names.items()):
        keys = " or ".join(f"`{entry[key]}`" for key in ("key", "or") if key in entry)
        lines.append(f"| `{name}` | {keys or 'none'} | {entry.get('note', 'the same value')} |")
    return "\n".join([*lines, ""])


def of_table(field: Schema) -> Schema | None:
    """The reference to the table of a field, or to each of its named tables; None for a value."""
    if "allOf" in field:
        return field
    inner = field.get("additionalProperties")
    return inner if isinstance(inner, dict) else None


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
    """The range of a value as text; empty if the type says everything."""
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
    """Write a value as in TOML. JSON differs only for small floats, for which Python and TOML have
    the same form."""
    return repr(value) if isinstance(value, float) else json.dumps(value, ensure_ascii=False)


if __name__ == "__main__":
    main()
