"""Another Go module builds with ours: what `go get` downloads from a module proxy.

The proxy is a folder of files, filled with the tags that `scripts/release` makes in a clone. Other
modules come from the module cache.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkout import clone

ROOT = Path(__file__).resolve().parents[2]
MODULES = ("proto", "database", "libs", "services", "cmd")
PREFIX = "github.com/rollout-rl/rollout"


def output(*command: str | Path, cwd: Path = ROOT, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout.strip()


@pytest.fixture(scope="session")
def version() -> Iterator[str]:
    """A version that no cache has. Its modules are removed from the module cache afterwards."""
    version = f"v0.0.0-check.{time.time_ns()}"
    yield version
    cache = Path(output("go", "env", "GOMODCACHE"))
    for path in [*cache.glob(f"{PREFIX}/*@{version}"), *cache.glob(f"cache/download/{PREFIX}/*/@v/{version}.*")]:
        if path.is_dir():
            output("chmod", "-R", "u+w", path)
            shutil.rmtree(path)
        else:
            path.unlink()


@pytest.fixture(scope="session")
def go(version: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a user of the released modules."""
    checkout = clone(tmp_path_factory.mktemp("release") / "clone")
    output(checkout / "scripts" / "release", version, cwd=checkout)
    proxy = tmp_path_factory.mktemp("proxy")
    for module in MODULES:
        publish(checkout, module, version, proxy)
    modules = f"{Path(output('go', 'env', 'GOMODCACHE')) / 'cache' / 'download'}"
    sources = f"file://{proxy},file://{modules},{output('go', 'env', 'GOPROXY')}"
    return os.environ | {"GOWORK": "off", "GOFLAGS": "-mod=mod -modcacherw", "GOPROXY": sources, "GOSUMDB": "off"}


def publish(checkout: Path, module: str, version: str, proxy: Path) -> None:
    """Write the files of a module that a proxy serves (https://go.dev/ref/mod#goproxy-protocol)."""
    folder = proxy / PREFIX / module / "@v"
    folder.mkdir(parents=True)
    tag = f"{module}/{version}"
    archive = folder / f"{version}.zip"
    root = f"{PREFIX}/{module}@{version}/"
    output("git", "archive", "--format=zip", f"--prefix={root}", f"--output={archive}", f"{tag}:{module}", cwd=checkout)
    with zipfile.ZipFile(archive, "a") as file:
        file.writestr(f"{root}LICENSE", (checkout / "LICENSE").read_text())
    (folder / f"{version}.mod").write_text(output("git", "show", f"{tag}:{module}/go.mod", cwd=checkout))
    when = output("git", "show", "--no-patch", "--format=%cI", tag, cwd=checkout)
    (folder / f"{version}.info").write_text(json.dumps({"Version": version, "Time": when}))
    (folder / "list").write_text(f"{version}\n")


def test_client(go: dict[str, str], version: str, tmp_path: Path) -> None:
    """The example of a client needs the contracts alone."""
    shutil.copy(ROOT / "examples" / "clients" / "go" / "main.go", tmp_path)
    output("go", "mod", "init", "example.com/submit", cwd=tmp_path, env=go)
    output("go", "get", f"{PREFIX}/proto@{version}", cwd=tmp_path, env=go)
    output("go", "build", "-o", "submit", ".", cwd=tmp_path, env=go)
    done = subprocess.run([tmp_path / "submit", "-state", tmp_path, "absent.toml"], capture_output=True, text=True)
    assert "no running rolloutd" in done.stderr
    assert f"{PREFIX}/services" not in (tmp_path / "go.sum").read_text()


def test_embedded_services(go: dict[str, str], version: str, tmp_path: Path) -> None:
    """A program hosts the buffer and the storage service; it puts and reads."""
    shutil.copy(ROOT / "examples" / "embed" / "main.go", tmp_path)
    output("go", "mod", "init", "example.com/embed", cwd=tmp_path, env=go)
    output("go", "get", f"{PREFIX}/services@{version}", cwd=tmp_path, env=go)
    printed = output("go", "run", ".", "-state", str(tmp_path / "state"), cwd=tmp_path, env=go)
    assert printed.splitlines() == [
        "buffer: 4 samples accepted, 4 read, step 1 committed",
        'storage: "notes about step 1" read, 1 event listed',
    ]


def test_programs_install(go: dict[str, str], version: str, tmp_path: Path) -> None:
    """`go install` refuses a module with replacements."""
    output("go", "install", f"{PREFIX}/cmd/rollout@{version}", cwd=tmp_path, env=go | {"GOBIN": str(tmp_path), "GOFLAGS": ""})
    assert output(tmp_path / "rollout", "--help").startswith("rollout")
