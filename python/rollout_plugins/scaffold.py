"""Makes the folder of a new plugin: code, golden samples, a test that passes, and what a package or
a sidecar needs."""

from __future__ import annotations

import keyword
import re
import shlex
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any, ClassVar

from rollout.errors import RolloutError
from rollout.hosting import manifest
from rollout.plugin.installed import KINDS

_NAME = re.compile(r"[a-z_][a-z0-9_]{0,62}")
_CONFIG = {
    "reward": '[reward]\nplugin = "{use}"',
    "environment": '[environment]\nkind = "python"\npath = "{use}"',
    "tool": '[environment]\nkind = "tools"\nargs = {{ tools = ["{use}"] }}',
    "data_source": '[data]\ntrain = "{use}"',
}


class ScaffoldRefused(RolloutError):
    """A new plugin can't be made."""

    reason: ClassVar[str] = "PLUGIN_NEW"


def new(kind: str, name: str, language: str, folder: str) -> dict[str, Any]:
    """Make a plugin in a new folder, ``folder/name``. Raises :class:`ScaffoldRefused`."""
    kind = kind.replace("-", "_")
    if kind not in KINDS:
        raise ScaffoldRefused(f"the kind `{kind}` is unknown", fix=f"write one of: {', '.join(KINDS)}")
    if not _NAME.fullmatch(name) or keyword.iskeyword(name):
        raise ScaffoldRefused(
            f"the name {name!r} is not an identifier in lower case", fix="use letters, digits, and underscores, at most 63"
        )
    if language not in ("python", "go"):
        raise ScaffoldRefused(f"there is no template in {language!r}", fix="write `--language python` or `--language go`")
    if language == "go" and kind not in manifest.KINDS:
        raise ScaffoldRefused(f"a plugin of the kind {kind} runs in the learner, in Python", fix="leave out `--language go`")
    target = Path(folder) / name
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ScaffoldRefused(f"{target} has files, which would be lost", fix="choose another name, or another --folder")
    use = f"plugin.toml:{name}" if language == "go" else f"{name}.py:{_object(kind, name)}"
    values = {"name": name, "object": _object(kind, name), "kind": kind, "use": use, "distribution": _distribution(name)}
    made: list[str] = []
    target.mkdir(parents=True, exist_ok=True)
    for file, text in sorted(_texts(kind, name, language).items()):
        (target / file).write_text(Template(text).substitute(values), encoding="utf-8")
        made.append(file)
    commands = [f"cd {target}", f"rollout plugin test {use}"]
    if language == "go":
        commands = [
            f"cd {target}",
            *_replace(),
            "go mod tidy",
            f"go build -o {name} .",
            "go test .",
            f"rollout plugin test {use}",
        ]
    else:
        commands.append("python -m pytest # if pytest is installed")
    config = _CONFIG.get(kind, "").format(use=f"{name}/{use}")
    return {"folder": str(target), "files": made, "plugin": use, "kind": kind, "commands": commands, "config": config}


def _replace() -> list[str]:
    """The command with which Go takes the modules of the checkout that this package is from."""
    root = Path(__file__).resolve().parents[2]
    if not (root / "libs" / "go.mod").is_file():
        return []
    modules = (f"-replace=github.com/rollout-rl/rollout/{name}={root / name}" for name in ("libs", "proto"))
    return [shlex.join(["go", "mod", "edit", *modules])]


def _object(kind: str, name: str) -> str:
    return "".join(part.capitalize() for part in name.split("_")) or "Plugin" if kind == "environment" else name


def _distribution(name: str) -> str:
    return re.sub("_+", "-", name.strip("_")) or "plugin"


def _texts(kind: str, name: str, language: str) -> dict[str, str]:
    folder = files("rollout_plugins") / "templates" / language

    def text(file: str) -> str:
        return (folder / file).read_text(encoding="utf-8")

    samples = (files("rollout_plugins") / "templates" / f"{kind}.jsonl").read_text(encoding="utf-8")
    if language == "go":
        return {
            "plugin.toml": text("plugin.toml.txt"), "go.mod": text("go.mod.txt"), "main.go": text(f"{kind}.go.txt"),
            "main_test.go": text(f"{kind}_test.go.txt"), "samples.jsonl": samples,
        }  # fmt: skip
    return {
        f"{name}.py": text(f"{kind}.py.txt"), f"test_{name}.py": text("test.py.txt"), "samples.jsonl": samples,
        "pyproject.toml": text("pyproject.toml.txt"),
    }  # fmt: skip
