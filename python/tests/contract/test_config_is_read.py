"""No dead keys: whatever a run's configuration can say, some code of Go or Python reads.

A read is an access to the field through its own table: ``train.beta1`` or
``GetTrain().GetBeta1()``, or the same through a variable that its file (in Go its package) makes of
that table or declares as that message. The same name in another table is none. The settings of
algorithms travel as dataclasses with the same names (``learner.settings``, held by its own test):
of them a read is ``x.clip_low`` or ``"clip_low"`` in the algorithms or the learner, checks of the
value left out.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from rollout.algorithm import NAMES, keys_of, table_of
from rollout.config.v1.run_config_pb2 import RunConfig

ROOT = Path(__file__).parents[3]
UNREAD: dict[str, str] = {}
"""Keys without a reader, with the reason."""
SETTINGS = {str(key.full_name).split(".")[-2] for name in NAMES for key in keys_of(table_of(name))}

Access = tuple[str, str]  # of what (a name, or another field), which field


def leaves(message: Descriptor, table: str = "", seen: frozenset[str] = frozenset()) -> Iterator[tuple[str, str, str]]:
    """(table, message, field) of every field except tables."""
    for field in message.fields:
        inner = _table(field)
        if inner is None:
            yield table, message.name, field.name
        elif inner.full_name not in seen:
            yield from leaves(inner, field.name, seen | {inner.full_name})


def _table(field: FieldDescriptor) -> Descriptor | None:
    inner = field.message_type
    if inner is not None and inner.GetOptions().map_entry:
        inner = inner.fields_by_name["value"].message_type
    return inner


FIELDS = sorted(set(leaves(RunConfig.DESCRIPTOR)))


@functools.cache
def go_packages() -> list[tuple[str, set[Access]]]:
    """The text of each Go package that is neither generated nor a test, and its accesses in the
    contract's names."""
    folders: dict[Path, str] = {}
    for part in ("libs", "services", "cmd"):
        for path in sorted((ROOT / part).rglob("*.go")):
            if not path.name.endswith("_test.go"):
                folders[path.parent] = folders.get(path.parent, "") + path.read_text()
    found = re.compile(r"\b(?:Get)?(\w+?)(?:\(\))?\.(?:Get([A-Z]\w*)\(\)|([A-Z]\w*)\b(?![(\w]))")
    chained = re.compile(r"(?=\b(?:Get)?(\w+?)(?:\(\))?\.Get([A-Z]\w*)\(\))")
    packages = []
    for text in folders.values():
        accesses = {(snake(m[1]), snake(m[2] or m[3])) for m in found.finditer(text)}
        accesses |= {(snake(m[1]), snake(m[2])) for m in chained.finditer(text)}
        packages.append((text, accesses))
    return packages


@functools.cache
def python_files() -> list[tuple[Path, str, set[Access]]]:
    """The same of each Python file."""
    files = []
    for path in sorted([*(ROOT / "python" / "rollout").rglob("*.py"), *(ROOT / "python" / "rollout_workers").rglob("*.py")]):
        if "_pb2" not in path.name:
            text = path.read_text()
            files.append((path, text, set(accesses(ast.parse(text)))))
    return files


def accesses(tree: ast.AST) -> Iterator[Access]:
    """Every ``a.b``, ``x.a.b`` and ``getattr(a, "b")``; of ``__post_init__`` those alone that set
    another field by it."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef) and node.name == "__post_init__":
            for inner in node.body:
                if isinstance(inner, ast.If) and "__setattr__" in ast.dump(inner):
                    yield from accesses(inner)
            continue
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            yield _last(node.value), node.attr
        if isinstance(node, ast.Call) and _last(node.func) == "getattr" and isinstance(node.args[1], ast.Constant):
            yield _last(node.args[0]), str(node.args[1].value)
        yield from accesses(node)


def _last(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def snake(camel: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", camel).lower()


def camel(name: str) -> str:
    return "".join(part[:1].upper() + part[1:] for part in name.split("_"))


def is_read(table: str, message: str, field: str) -> bool:
    if message in SETTINGS:
        places = {ROOT / "python/rollout_workers" / part for part in ("algorithms", "trainer")}
        if any(got == field for path, _, found in python_files() if places & set(path.parents) for _, got in found):
            return True
    for text, found in go_packages():
        if any(got == field and (of == table or _made(of, text, camel(table) or "RunConfig", message)) for of, got in found):
            return True
    return any(
        got == field and ((table and of == table) or _made(of, text, table or "config", message))
        for _, text, found in python_files()
        for of, got in found
    )


def _made(name: str, text: str, table: str, message: str) -> bool:
    """Whether a line makes the variable of the table, or declares it as the message."""
    if not name:
        return False
    ended = r"(?:\(\))?(?:\.(?:items|values)\(\)|\[\w+\])?\s*(?:$|[,;:{)]|or\b)"
    made = rf"\b{re.escape(name)}\b[^\n=]*(?:=|\bin\b)[^\n]*{table}(?!\w){ended}"
    declared = rf"\b{re.escape(name)}\b(?:: |[^\n=]*configv1\.){message}\b"
    return re.search(rf"{made}|{declared}", text, re.MULTILINE | re.IGNORECASE) is not None


@pytest.mark.parametrize(("table", "message", "field"), FIELDS, ids=[f"{message}.{field}" for _, message, field in FIELDS])
def test_every_key_is_read(table: str, message: str, field: str) -> None:
    read = is_read(table, message, field)
    if f"{message}.{field}" in UNREAD:
        assert not read, f"{message}.{field} is read by now: take it off the list"
    else:
        assert read, f"nothing reads `{table}.{field}` ({message}): make it act, or remove it from the contract"


def test_a_field_that_nobody_reads_is_seen() -> None:
    assert len(FIELDS) > 140
    assert not is_read("train", "TrainConfig", "momentum_of_nothing")
    assert not is_read("train", "TrainConfig", "max_model_len")  # another table's
    assert not is_read("grpo", "GrpoConfig", "gamma_of_nothing")
