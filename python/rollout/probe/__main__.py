"""The planner's calls of Python in a separate process: ``python -m rollout.probe``, JSON in, JSON
out.

The planner can't import a user's reward, a tokenizer, or a library for data sets, and a crash of
such code must not end it. So this process reads one request from stdin, writes one answer to the
original stdout, and exits. Output of the user's code goes to stderr. A thread reports a call that
hangs, with the line at which it hangs. The process imports no torch and answers within a second,
unless it prepares data.

Request (each part is optional)::

    {"data": [(see rollout.source.prepare)],
     "models": [{"name": "org/name@revision", "patterns": ["*.json", ...]}],
     "packages": ["torch", ...],
     "reward": {"plugin": "reward.py:exact" (or "expression": "..."), "base_dir": "/...", "timeout_seconds": 30.0,
                "samples": [{"prompt": "...", "completion": "...", "row": {...}}], "held_out": [...], "model": "/...",
                "files": [{"path": "/...", "name": "train.jsonl"}]},
     "tokenizer": {"model": "/...", "chat_template": false,
                   "files": [{"path": "/...", "prompt_field": "prompt", "answer_fields": [], "limit": 1920,
                              "overlong": "error"}]},
     "teacher": {"model": "/...", "base_url": "http://...", "name": "teacher", "api_key": "env:KEY", "protocol": "echo",
                 "timeout_seconds": 60.0, "prompt": "..."},
     "environment": {"plugin": "guess.py:Guess" (or "kind": "gymnasium"), "base_dir": "/...", "args": "{}",
                     "timeout_seconds": 120.0, "rows": [{...}]}
                    (with "kind": "multistep" also "model": "/...", "chunk": 4, "reward_type": "chunk_level"),
     "plugins": ["acme-rewards", ...],
     "wandb_key": true}

Answer::

    {"data": [(see rollout.source.prepare) | {"error": ..., "source": "math"}],
     "models": [{"folder": "/...", "revision": "e53f048..."} | {"error": ...}],
     "plugins": {"acme-rewards": {"name", "version", "digest"}, "absent": null},
     "python": "3.11.7", "packages": {"torch": "2.15.0", "absent": null},
     "reward": {"scores": [{"reward": 1.0, "metrics": {}}], "parts": false, "files": ["/.../reward.py"],
                "plugins": [{"name": "acme-rewards", "version": "1.0", "digest": "sha256-...", "kind": "reward"}], "seconds": 0.1}
               | {"error": ...},
     "tokenizer": {"files": [{"longest": 12, "rows": 9500, "over": 2, "examples": [{"row": 7, "tokens": 2101}], "empty": [],
                              "drop": [], "cut": 0, "unknown": 1, "strange": [{"row": 3, "text": "é", "field": "prompt"}]}]}
                  | {"error": ...},
     "teacher": {"tokens": 12} | {"error": ...},
     "environment": {"files": ["/.../guess.py"], "name": "Guess", "seconds": 0.1,
                     "tools": [{"server", "name", "description", "parameters", "digest"}] (of mcp)} | {"error": ...},
     "wandb_key": false}

with ``error`` being ``{"reason", "message", "fix", "file", "line", "column", "text"}``.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import cast

from rollout.errors import Place, RolloutError
from rollout.hosting.wire import EnvironmentTimeout
from rollout.plugin.installed import PluginNotInstalled, package_of
from rollout.probe.environment import has_wandb_key, versions
from rollout.probe.prompts import measure
from rollout.probe.reward import dry_call
from rollout.probe.tokenizer import Json
from rollout.source import hub
from rollout.source.errors import SourceRefused
from rollout.source.prepare import prepare


def main() -> None:
    """Answer the request on stdin."""
    answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # output of the user's code, including C code, goes to stderr
    request: Json = json.load(sys.stdin)
    once = threading.Lock()

    def reply(body: Json) -> None:
        if once.acquire(blocking=False):  # both the watchdog and the call may reply
            json.dump(body, answer)
            answer.flush()

    def hung(part: str, error: RolloutError) -> None:
        reply(body | {part: {"error": describe(error)}})
        os._exit(0)

    def began() -> None:  # startup and reading do not count as time of the user's code
        answer.write("\n")
        answer.flush()

    body: Json = {"python": platform.python_version(), "packages": versions(request.get("packages", []))}
    if "data" in request or "models" in request:
        from rollout.probe import rows  # numpy takes a while to import

        body["data"] = [guarded(partial(prepare, one, rows)) for one in cast("list[Json]", request.get("data") or [])]
        body["models"] = [guarded(partial(hub.download, one)) for one in cast("list[Json]", request.get("models") or [])]
    if "plugins" in request:
        body["plugins"] = {name: _package(name) for name in request["plugins"]}
    if request.get("wandb_key"):
        body["wandb_key"] = has_wandb_key()
    if "tokenizer" in request:
        body["tokenizer"] = guarded(lambda: measure(request["tokenizer"]))
    if "teacher" in request:
        from rollout.probe.teacher import ask_teacher  # requests takes a while to import

        body["teacher"] = guarded(lambda: ask_teacher(request["teacher"]))
    if "reward" in request:
        body["reward"] = guarded(lambda: dry_call(request["reward"], partial(hung, "reward"), began))
    if "environment" in request:
        body["environment"] = guarded(lambda: _environment(request["environment"], partial(hung, "environment"), began))
    reply(body)
    sys.stdout.flush()
    os._exit(0)  # do not wait for threads of the user's code


def _package(name: str) -> Json | None:
    try:
        return asdict(package_of(name))
    except PluginNotInstalled:
        return None


def _environment(request: Json, hung: Callable[[EnvironmentTimeout], None], began: Callable[[], None]) -> Json:
    if request.get("kind") == "multistep":
        from rollout.probe.acting import dry_steps

        return dry_steps(request, hung, began)
    from rollout.probe.episode import dry_episode  # numpy takes a while to import

    return dry_episode(request, hung, began)


def guarded(part: Callable[[], Json]) -> Json:
    """The answer of ``part``, or its error."""
    try:
        return part()
    except SourceRefused as refused:
        return {"error": describe(refused.error), "source": refused.source}
    except RolloutError as error:
        return {"error": describe(error)}
    except Exception as error:
        lines = traceback.format_exception_only(error)
        return {"error": {"reason": "PROBE_FAILED", "message": " ".join("".join(lines).split()), "fix": ""}}


def describe(error: RolloutError) -> Json:
    """An error as JSON."""
    place = error.place or Place("")
    return {
        "reason": error.reason,
        "message": error.message,
        "fix": error.fix,
        "file": place.file,
        "line": place.line,
        "column": place.column,
        "text": place.text,
    }


if __name__ == "__main__":
    main()
