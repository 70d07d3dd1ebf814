"""The dry episode of an environment: it is imported and constructed, and plays one turn of the
first rows with a watchdog."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np

from rollout.environment import Refusal, Result, Task, Turn
from rollout.environments import source
from rollout.environments.mcp_tools import McpTools, settings_of
from rollout.hosting.answers import EnvironmentBadResult
from rollout.hosting.episodes import Checked, load_environment
from rollout.hosting.manifest import is_manifest
from rollout.hosting.wire import EnvironmentTimeout
from rollout.plugin import split_plugin
from rollout.plugin.installed import is_installed
from rollout.plugin.loading import folder_of_file, load_object
from rollout.plugin.schema import function_schema
from rollout.probe.reward import local_files, packages_of, watchdog
from rollout.probe.tokenizer import Json
from rollout.sandbox import Sandbox
from rollout.tools import BOXED, Search, named_tools


def dry_episode(request: Json, hung: Callable[[EnvironmentTimeout], None], began: Callable[[], None]) -> Json:
    """Play the first turn of the rows with an empty answer. Calls ``began`` before, and ``hung``
    from another thread after a timeout."""
    if request.get("kind") == "tools":
        return _dry_tools(request, began)
    if request.get("kind") == "mcp":
        return asyncio.run(_dry_servers(request, began))
    path, users = request["plugin"], request["base_dir"]
    if is_manifest(path):
        from rollout.probe.sidecars import sidecar_episode  # grpc takes a while to import

        return asyncio.run(sidecar_episode(request, began))
    loaded = source(request.get("kind", ""), path, users, request.get("args") or "{}")
    limit = float(request["timeout_seconds"])
    file, name = split_plugin(loaded["plugin"])
    folders = set[Path]()
    if path:
        folders = {Path(users)} if is_installed(path) else {Path(users), folder_of_file(path, users)}
    began()
    start = time.monotonic()
    watch = watchdog(hung, folders, limit, EnvironmentTimeout, "make it faster or raise `environment.turn_timeout_seconds`")
    with watch(f"importing {file}"):
        environment = load_environment(loaded["plugin"], loaded["base_dir"], json.loads(loaded["args"]))
    tasks = [
        Task(f"plan/{number}", json.dumps(row).encode(), (0, 1), (2 * number, 2 * number + 1), number)
        for number, row in enumerate(request["rows"])
    ]
    asyncio.run(_play(environment, tasks, watch))
    return {
        "files": local_files(folders) if path else [],
        "plugins": packages_of([path], "environment") if path else [],
        "name": name,
        "seconds": time.monotonic() - start,
        "saves_episodes": environment.saves_episodes,
    }


def _dry_tools(request: Json, began: Callable[[], None]) -> Json:
    """Import the tools, and describe them as to the policy."""
    base_dir = request["base_dir"]
    files, ours = named_tools(json.loads(request.get("args") or "{}"))
    folders = {Path(base_dir)} | {folder_of_file(file, base_dir) for file in files if not is_installed(file)}
    began()
    start = time.monotonic()
    pinned: list[str] = []
    for file in files:
        if is_manifest(file):
            from rollout.probe.sidecars import sidecar_tool

            pinned += asyncio.run(sidecar_tool(file, base_dir))
        else:
            function_schema(load_object(file, base_dir, kind="tool"))
    if "search" in ours:
        Search(os.path.join(str(base_dir), str(json.loads(request["args"])["search"])), 0.0)
    if set(ours) & set(BOXED) and (error := Sandbox.probe().error):
        raise error
    found = sorted({*pinned, *(local_files(folders) if files else [])})
    return {"files": found, "plugins": packages_of(files, "tool"), "name": "tools", "seconds": time.monotonic() - start}


async def _dry_servers(request: Json, began: Callable[[], None]) -> Json:
    """Start the MCP servers, and list their tools. Each server has its own deadline."""
    base_dir, args = str(request["base_dir"]), json.loads(request.get("args") or "{}")
    began()
    start = time.monotonic()
    environment = McpTools(args, base_dir)
    try:
        tools = await environment.tools()
    finally:
        await environment.shutdown()
    described = [
        {"server": t.server, "name": t.name, "description": t.description, "parameters": json.dumps(t.parameters, sort_keys=True),
         "digest": t.digest}
        for t in tools
    ]  # fmt: skip
    files = {file for settings in settings_of(args).values() for file in settings.files(base_dir)}
    return {"files": sorted(files), "name": "mcp", "seconds": time.monotonic() - start, "tools": described}


async def _play(environment: Checked, tasks: list[Task], watch: Callable[[str], AbstractContextManager[None]]) -> None:
    await environment.start()
    try:
        with watch(f"`{environment.name}.reset`"):
            starts = await environment.reset(tasks)
        turns: list[Turn] = []
        for task, first in zip(tasks, starts, strict=True):
            if isinstance(first, Refusal):
                raise EnvironmentBadResult(
                    f"`{environment.name}.reset` refused training row {task.row + 1}: {first.message} ({first.reason})",
                    fix="correct the row, or what the environment expects of it",
                )
            for sample in task.samples if environment.waits_for_siblings else (0,):
                turns.append(Turn(task, sample, 0, first.text, np.zeros(0, np.int32), "", False, first.token_ids))
        with watch(f"`{environment.name}.step`"):
            answers = await environment.step(turns)
        for answer in answers:
            if isinstance(answer, Result) and answer.reason == EnvironmentBadResult.reason:
                message, _, fix = answer.message.partition("; ")
                raise EnvironmentBadResult(message, fix=fix)
        with watch(f"`{environment.name}.close`"):
            await environment.close([(task.key, sample) for task in tasks for sample in task.samples])
    finally:
        await environment.shutdown()
