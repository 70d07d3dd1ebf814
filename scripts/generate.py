"""Regenerate everything that is made from the contracts in proto/: Go messages and gRPC stubs in
proto/gen (buf, protoc-gen-go, protoc-gen-go-grpc); Python messages, stubs, and types in python/
(grpcio-tools, mypy-protobuf); the JSON Schema of the run config in schemas/ (protoc-gen-jsonschema,
scripts/schema.py); subjects, streams, and service names in **/names.* (scripts/names.py); and the
capabilities of the engines in libs/engine/ (python -m rollout_workers.engines.registry).

Files are written to a scratch folder first, and only those that differ are copied into the tree. A
run without changes touches nothing, and a failed run leaves the tree unchanged.
"""

from __future__ import annotations

import importlib
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import names

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ROOT / ".tools"
PROTO = ROOT / "proto"
RULES = TOOLS / "protovalidate"
CONFIG = PROTO / "rollout" / "config" / "v1"


def main() -> None:
    with tempfile.TemporaryDirectory(dir=TOOLS, prefix="generate-") as name:
        scratch = Path(name)
        generate_go(scratch)
        generate_python(scratch)
        generate_schema(scratch)
        generate_names(scratch)
        generate_engines(scratch)


def generate_go(scratch: Path) -> None:
    run([TOOLS / "bin" / "buf", "generate", "--template", "buf.gen.yaml", "--output", scratch])
    sync(scratch / "go" / "rollout", PROTO / "gen" / "rollout")


def generate_python(scratch: Path) -> None:
    """Write messages for every contract, stubs for those with a service, and the messages of the
    validation rules."""
    out = scratch / "python"
    out.mkdir()
    contracts = sorted((PROTO / "rollout").rglob("*.proto"))
    protoc(out, ["python", "mypy"], [*contracts, RULES / "buf" / "validate" / "validate.proto"])
    protoc(out, ["grpc_python", "mypy_grpc"], [path for path in contracts if has_service(path)])
    sync(out / "buf", ROOT / "python" / "buf")
    generated = {path.relative_to(out / "rollout").parts[0] for path in (out / "rollout").rglob("*_pb2.py")}
    for noun in sorted(generated | committed_nouns()):
        sync(out / "rollout" / noun, ROOT / "python" / "rollout" / noun)


def protoc(out: Path, kinds: Iterable[str], files: list[Path]) -> None:
    if not files:
        return
    binaries = Path(sys.executable).parent
    plugins = [f"--plugin={name}={binaries / name}" for name in ("protoc-gen-mypy", "protoc-gen-mypy_grpc")]
    outputs = [f"--{kind}_out={'quiet:' if kind.startswith('mypy') else ''}{out}" for kind in kinds]
    run([sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTO}", f"-I{RULES}", *plugins, *outputs, *files])


def has_service(path: Path) -> bool:
    return any(line.startswith("service ") for line in path.read_text().splitlines())


def committed_nouns() -> set[str]:
    return {path.parts[-3] for path in (ROOT / "python" / "rollout").glob("*/v1/*_pb2.py")}


def generate_schema(scratch: Path) -> None:
    if not CONFIG.exists():
        return
    run([TOOLS / "bin" / "buf", "generate", "--template", "buf.gen.schema.yaml", "--output", scratch])
    bundle = scratch / "schema" / "rollout.config.v1.RunConfig.schema.strict.bundle.json"
    sys.path.insert(0, str(ROOT / "python"))
    schema = importlib.import_module("schema")  # imports the modules that generate_python wrote
    shaped = schema.shape(json.loads(bundle.read_text()))
    out = scratch / "schemas" / "run_config.schema.json"
    out.parent.mkdir()
    out.write_text(json.dumps(shaped, indent=2, ensure_ascii=False) + "\n")
    replace(out, ROOT / "schemas" / out.name)


def generate_names(scratch: Path) -> None:
    for place, text in names.generate(ROOT).items():
        out = scratch / "names" / place
        out.parent.mkdir(parents=True)
        out.write_text(text)
        if out.suffix == ".go":
            run(["gofmt", "-w", out])
        replace(out, ROOT / place)


def generate_engines(scratch: Path) -> None:
    """Write the capabilities of the engines, which the planner reads."""
    out = scratch / "capabilities.json"
    out.write_text(run([sys.executable, "-m", "rollout_workers.engines.registry"], capture=True))
    replace(out, ROOT / "libs" / "engine" / out.name)


def sync(source: Path, target: Path) -> None:
    """Make the generated files in target equal to those in source: write changed files and remove
    surplus ones."""
    wanted = {path.relative_to(source) for path in source.rglob("*") if path.is_file()}
    present = {path.relative_to(target) for path in target.rglob("*") if path.is_file() and is_generated(path)}
    for path in sorted(present - wanted):
        (target / path).unlink()
    for path in sorted(wanted):
        replace(source / path, target / path)


def is_generated(path: Path) -> bool:
    return path.name.endswith((".pb.go", "_pb2.py", "_pb2.pyi", "_pb2_grpc.py", "_pb2_grpc.pyi"))


def replace(source: Path, target: Path) -> None:
    if target.exists() and target.read_bytes() == source.read_bytes():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    print(target.relative_to(ROOT))


def run(command: list[str | Path], capture: bool = False) -> str:
    done = subprocess.run(command, cwd=ROOT, check=False, text=True, stdout=subprocess.PIPE if capture else None)
    if done.returncode != 0:
        sys.exit(f"generate: {Path(command[0]).name} failed with exit code {done.returncode}")
    return done.stdout or ""


if __name__ == "__main__":
    main()
