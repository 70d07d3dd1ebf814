"""The distributions of Python: each is built, installed alone, imported, and used.

Dependencies have the versions of `requirements-dev.lock`, which are in uv's cache after `make
venv-dev`.
"""

from __future__ import annotations

import email.message
import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from email.parser import Parser
from pathlib import Path
from typing import Any

import pytest
from checkout import clone, git
from mesh import mesh

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
FOLDERS = {
    "rollout-rl": ROOT / "python",
    "rollout-plugins": ROOT / "python" / "plugins",
    "rollout-workers": ROOT / "python" / "workers",
}
NEEDS = {"rollout-rl": (), "rollout-plugins": ("rollout-rl",), "rollout-workers": ("rollout-rl", "rollout-plugins")}
"""The other distributions that each installs."""
UV = ROOT / ".venv" / "bin" / "uv"
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def run(*command: str | Path, cwd: Path = ROOT, **variables: str) -> str:
    done = subprocess.run(command, cwd=cwd, env=ENVIRONMENT | variables, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def build(folder: Path, kind: str, target: Path) -> Path:
    run(sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", target, cwd=folder)
    (made,) = target.iterdir()
    return made


def metadata(wheel: Path) -> email.message.Message:
    with zipfile.ZipFile(wheel) as file:
        (name,) = (name for name in file.namelist() if name.endswith(".dist-info/METADATA"))
        return Parser().parsestr(file.read(name).decode())


@dataclass(frozen=True)
class Built:
    sources: Path
    wheel: Path  # made from the source distribution


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Built]:
    out: dict[str, Built] = {}
    for name, folder in FOLDERS.items():
        place = tmp_path_factory.mktemp(name)
        sources = build(folder, "sdist", place / "sdist")
        with tarfile.open(sources) as file:
            file.extractall(place, filter="data")
        out[name] = Built(sources, build(place / sources.name.removesuffix(".tar.gz"), "wheel", place / "wheel"))
    return out


@pytest.fixture(scope="session")
def install(built: dict[str, Built], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """Makes an environment with a distribution and one of its extras, and returns its Python. Needs
    no network where the dependencies are cached."""
    made: dict[str, Path] = {}

    def install(name: str, extra: str = "") -> Path:
        key = f"{name}[{extra}]"
        if key not in made:
            folder = tmp_path_factory.mktemp("environment")
            wheels = [f"{other} @ {built[other].wheel.as_uri()}" for other in NEEDS[name]]
            wanted = f"{name}[{extra}]" if extra else name
            run(UV, "venv", "--quiet", "--python", sys.executable, folder / "venv")
            python = folder / "venv" / "bin" / "python"
            versions = ROOT / "python" / "requirements-dev.lock"
            arguments = ["--quiet", "--python", python, "--constraint", versions, f"{wanted} @ {built[name].wheel.as_uri()}"]
            run(UV, "pip", "install", *arguments, *wheels)
            made[key] = python
        return made[key]

    return install


@pytest.mark.parametrize("name", FOLDERS)
def test_wheel_from_a_checkout_equals_that_from_sources(name: str, built: dict[str, Built], tmp_path: Path) -> None:
    wheel = build(FOLDERS[name], "wheel", tmp_path)
    assert wheel.name == built[name].wheel.name
    with zipfile.ZipFile(wheel) as one, zipfile.ZipFile(built[name].wheel) as other:
        assert set(one.namelist()) == set(other.namelist())
        package = "rollout" if name == "rollout-rl" else name.replace("-", "_")
        assert f"{package}/py.typed" in one.namelist()
        assert not [file for file in one.namelist() if "tests/" in file or "rollout_testing" in file]
        assert [file for file in one.namelist() if file.endswith("LICENSE")]
    assert metadata(wheel).items() == metadata(built[name].wheel).items()


def test_each_requires_the_others_of_its_version(built: dict[str, Built]) -> None:
    found = {name: metadata(made.wheel) for name, made in built.items()}
    version = found["rollout-rl"]["Version"]
    for name, needed in NEEDS.items():
        required = {each for each in found[name].get_all("Requires-Dist", []) if each.startswith("rollout-")}
        assert found[name]["Version"] == version and required == {f"{other}=={version}" for other in needed}


def test_version_is_that_of_the_newest_tag(tmp_path: Path) -> None:
    checkout = clone(tmp_path / "clone")
    git("tag", "v9.8.7", folder=checkout)
    git("tag", "libs/v10.0.0", folder=checkout)

    def versions() -> list[str]:
        folders = (checkout / "python", checkout / "python" / "plugins", checkout / "python" / "workers")
        return [run(sys.executable, "-m", "hatchling", "version", cwd=folder).strip() for folder in folders]

    assert versions() == ["9.8.7"] * 3
    shutil.rmtree(checkout / ".git")  # as in an image
    assert versions() == ["0.1.0.dev0"] * 3


@pytest.mark.parametrize("extra", ["", "cel"])
def test_light(extra: str, install: Callable[..., Path]) -> None:
    python = install("rollout-rl", extra)
    assert run(python, "-I", HERE / "import_all.py", "rollout-rl").split()[1] == "False", "torch was imported"
    run(python, "-I", HERE / "use_light.py", *([extra] if extra else []))


def test_plugins(install: Callable[..., Path], tmp_path: Path) -> None:
    """A plugin is made and tested where no workers are installed."""
    python = install("rollout-plugins")
    assert run(python, "-I", HERE / "import_all.py", "rollout-plugins").split()[1] == "False", "torch was imported"
    program = python.with_name("rollout-plugins")

    def ask(**request: object) -> dict[str, Any]:
        spec = tmp_path / "request.json"
        spec.write_text(json.dumps(request))
        return json.loads(run(program, "plugin", "--spec", spec, cwd=tmp_path))

    made = ask(new="reward", name="digits", language="python", folder=str(tmp_path))
    report = ask(test=made["plugin"], base_dir=made["folder"])["report"]
    assert report["passed"], report
    assert {plugin["from"] for plugin in ask(list=True, folder=str(tmp_path))["plugins"]} == {"builtin"}


def test_workers(install: Callable[..., Path]) -> None:
    python = install("rollout-workers")
    run(python, "-I", HERE / "import_all.py", "rollout-workers", OMP_WAIT_POLICY="PASSIVE")
    run(python, "-I", HERE / "use_workers.py")


@pytest.mark.parametrize("extra", ["tensorboard", "wandb", "mlflow", "formats", "hub", "adamw-8bit"])
def test_extra(extra: str, install: Callable[..., Path]) -> None:
    run(install("rollout-workers", extra), "-I", HERE / "use_workers.py", extra)


def test_installed_client_trains_on_installed_workers(
    install: Callable[..., Path], config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No process imports from the checkout."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    worker = install("rollout-workers").with_name("rollout-worker")
    settings = tmp_path / "rolloutd.toml"
    settings.write_text(f'[worker]\ncommand = ["{worker}"]\n')
    with mesh(tmp_path / "state", config=settings) as running:
        run(install("rollout-rl"), "-I", HERE / "use_light.py", "--train", running.state, config)


def test_every_extra_is_tested(built: dict[str, Built]) -> None:
    extras = {name: set(metadata(made.wheel).get_all("Provides-Extra", [])) for name, made in built.items()}
    workers = {"tensorboard", "wandb", "mlflow", "formats", "hub", "adamw-8bit"}
    assert extras == {"rollout-rl": {"cel"}, "rollout-plugins": set(), "rollout-workers": workers}
