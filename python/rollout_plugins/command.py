"""The requests of ``rollout plugin``, JSON in a file, JSON on the standard output."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from rollout.environments import install as environments
from rollout.errors import RolloutError
from rollout.hosting.manifest import is_manifest, read_manifest
from rollout.hosting.wire import PluginError
from rollout.suites import PACKAGES
from rollout_plugins import listing, packages, scaffold


def command(spec: str) -> int:
    """Answer the request in the file ``spec``, one of::

        {"list": true, "folder": "/..."}
        {"install": "gymnasium", "folder": "/...", "again": false}
        {"install": "acme-rewards==1.0", "base_dir": "/...", "again": false}
        {"new": "reward", "name": "word_count", "language": "python", "folder": "/..."}
        {"test": "reward.py:exact", "base_dir": "/...", "kind": "", "samples": "", "timeout": 10.0}

    The exit code is 1 with ``{"error": {"reason", "message", "fix", "file", "line"}}``.
    """
    return answered(lambda: _answer(json.loads(Path(spec).read_text()), spec))


def answered(answer: Callable[[], dict[str, Any]]) -> int:
    """Print an answer or its error. Returns the exit code."""
    out = sys.stdout
    try:
        with redirect_stdout(sys.stderr):  # what a plugin prints
            body = answer()
    except RolloutError as error:
        place = {"file": error.place.file, "line": error.place.line} if error.place is not None else {}
        json.dump({"error": {"reason": error.reason, "message": error.message, "fix": error.fix, **place}}, out)
        out.flush()
        return 1
    json.dump(body, out)
    out.flush()
    return 0


def _answer(request: dict[str, Any], spec: str) -> dict[str, Any]:
    if request.get("list"):
        return listing.listed(request.get("folder") or ".")
    if "new" in request:
        return scaffold.new(request["new"], request["name"], request["language"], request["folder"])
    if "test" in request:
        plugin = request["test"]
        served = is_manifest(plugin) and bool(read_manifest(plugin, request["base_dir"]).address)
        os.execv(sys.executable, [sys.executable, "-P", "-m", "rollout_plugins.isolated", spec, *(["served"] if served else [])])
    if "install" in request:
        again = bool(request.get("again"))
        kind = request["install"].replace("-", "_")
        if kind not in environments.KINDS:
            return packages.install_package(request["install"], request["base_dir"], again=again)
        made = environments.install(kind, request["folder"], again=again)
        return {"python": str(made), "packages": environments.packages(kind), "kind": kind, "suite": kind in PACKAGES}
    raise PluginError(
        f"the request has none of list, new, test, install: {sorted(request)}", fix="update rollout and the workers together"
    )
