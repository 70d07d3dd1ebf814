"""Every key of rolloutd.toml is read by Go code outside of the checks in libs/config.

A read of `[nats] url` is `x.NATS.URL`, or `n.URL` for a variable of the type `config.NATS` in the
same package.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
CONFIG = ROOT / "libs" / "config"
CHECKS = "check|finish|passedOn|paths|place|Secrets|Default"
"""Functions that only check, resolve, list, or set values."""


def structs() -> dict[str, dict[str, tuple[str, str]]]:
    """Of each struct with TOML names, by its type: Go field -> (Go type, TOML name)."""
    text = (CONFIG / "config.go").read_text()
    found: dict[str, dict[str, tuple[str, str]]] = {}
    for match in re.finditer(r"^type (\w+) struct \{\n(.*?)^\}", text, re.MULTILINE | re.DOTALL):
        fields = re.findall(r'^\t(\w+)\s+(\S+)\s+`toml:"(\w+)"`', match[2], re.MULTILINE)
        if fields:
            found[match[1]] = {name: (kind, key) for name, kind, key in fields}
    return found


def keys() -> list[tuple[str, str, str, str]]:
    """(key, type, Go field of the table in Config, Go field) of every key."""
    types = structs()
    found: list[tuple[str, str, str, str]] = []
    for name, (kind, key) in types["Config"].items():
        if kind in types:
            found += [(f"{key}.{inner_key}", kind, name, inner) for inner, (_, inner_key) in types[kind].items()]
        else:
            found.append((key, "Config", "", name))
    return found


@functools.cache
def sources() -> list[str]:
    """The text of each Go package without its tests and without the checks of the configuration."""
    texts: dict[Path, str] = {}
    for part in ("cmd", "libs", "services"):
        for path in sorted((ROOT / part).rglob("*.go")):
            text = path.read_text()
            if path.parent == CONFIG:
                text = re.sub(rf"^func (\([^)]*\) )?({CHECKS})\(.*?^\}}", "", text, flags=re.MULTILINE | re.DOTALL)
                if path.name in ("keys.go", "load.go"):
                    continue
            if not path.name.endswith("_test.go"):
                texts[path.parent] = texts.get(path.parent, "") + text
    return list(texts.values())


def is_read(kind: str, table: str, field: str) -> bool:
    access = rf"{field}\b(?!\s*=[^=])"
    for text in sources():
        if table and re.search(rf"\.{table}\.{access}", text):
            return True
        declared = rf"\b(\w+) \*?(?:config\.)?{kind}\b" if "libs/config" in text or "package config" in text else r"(?!)"
        assigned = rf"\b(\w+) := \w+(?:\.\w+)*\.{table}\b(?!\.)" if table else r"(?!)"
        names = set(re.findall(declared, text)) | set(re.findall(assigned, text))
        if any(re.search(rf"\b{name}\.{access}", text) for name in names):
            return True
    return False


@pytest.mark.parametrize(("key", "kind", "table", "field"), keys(), ids=[key[0] for key in keys()])
def test_every_key_is_read(key: str, kind: str, table: str, field: str) -> None:
    assert is_read(kind, table, field), f"nothing reads `{key}` of rolloutd.toml: make it act, or remove it"


def test_an_unread_key_is_reported() -> None:
    assert len(keys()) > 50
    assert not is_read("NATS", "NATS", "Durability")  # of another table
    assert not is_read("Config", "", "Nothing")
