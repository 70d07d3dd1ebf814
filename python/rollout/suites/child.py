"""The process that runs the tasks of a library: ``python -P -m rollout.suites.child SPEC``.

SPEC is a file with one JSON object (:class:`rollout.suites.types.Request`). The process writes
``{"version", "metrics", "samples"}`` to ``result``, or ``{"error": {"reason", "message", "fix"}}``.
It exits without a result if it is killed or runs out of memory: then nothing has been measured.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from dataclasses import asdict
from pathlib import Path

from rollout.errors import RolloutError
from rollout.suites import PACKAGES
from rollout.suites.types import LibraryMissing, Measured, Request


def run(request: Request) -> Measured:
    """Raises ``RolloutError``."""
    try:
        if request.kind == "inspect_ai":
            from rollout.suites.inspect_tasks import evaluate
        else:
            from rollout.suites.lm_eval_tasks import evaluate
    except ImportError as error:
        if (error.name or "").split(".")[0] not in (request.kind, "openai", "transformers", "tenacity"):
            raise
        raise LibraryMissing(
            f"{sys.executable} has no package {PACKAGES[request.kind]}: {error}",
            fix=f"run `rollout plugin install {request.kind}`, or set `python` of the suite to an interpreter with the package",
        ) from error
    return evaluate(request)


def _end_with_parent() -> None:
    while os.read(0, 4096):
        pass
    os._exit(1)


def main(path: str) -> int:
    """Run a request, and write its result. The process ends when its standard input closes."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    request = Request(**json.loads(Path(path).read_text()))
    try:
        body, code = asdict(run(request)), 0
    except RolloutError as error:
        body, code = {"error": {"reason": error.reason, "message": error.message, "fix": error.fix}}, 1
    part = Path(request.result + ".part")
    part.write_text(json.dumps(body))
    os.replace(part, request.result)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
