"""The dry call of a reward: it is imported, or compiled, and called once with a watchdog."""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import json
import linecache
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout.dataset import rows
from rollout.errors import Place, RolloutError
from rollout.hosting.boxed import BoxLimits, binds_of, box_environment, check_host, ended, reported
from rollout.hosting.child import START_SECONDS, exhausted
from rollout.hosting.manifest import is_manifest
from rollout.hosting.scorers import kind_of
from rollout.hosting.wire import PluginError, with_reason
from rollout.plugin import RewardError, RewardFunction, RewardTimeout, Sample, call_reward, load_reward, split_plugin
from rollout.plugin.installed import is_installed, package
from rollout.probe.tokenizer import BadModel, Json, tokenizer_of
from rollout.sandbox import Sandboxes

if TYPE_CHECKING:
    from rollout.expression import FieldUse

PACKAGE = Path(__file__).parent.parent


def dry_call(request: Json, hung: Callable[[RewardTimeout], None], began: Callable[[], None]) -> Json:
    """Import the reward and call it once. Calls ``began`` before, and ``hung`` from another thread
    after a timeout."""
    if (limits := request.get("sandbox")) is not None:
        return asyncio.run(_boxed_call(request, BoxLimits(**limits), began))
    try:
        return _call(request, hung, began)
    except RolloutError as error:
        if request.get("in_box") and (reason := exhausted(error)):
            raise with_reason(error, reason) from error
        raise


def _call(request: Json, hung: Callable[[RewardTimeout], None], began: Callable[[], None]) -> Json:
    expression, base_dir = request.get("expression"), request["base_dir"]
    plugin = request.get("plugin", "")
    if is_manifest(plugin):
        from rollout.probe.sidecars import sidecar_call  # numpy takes a while to import

        return asyncio.run(sidecar_call(request, samples_of, began))
    limit, kind = float(request["timeout_seconds"]), kind_of(plugin, base_dir, evaluates=bool(request.get("evaluates")))
    folders = {Path(base_dir)}
    named = not expression and is_installed(plugin)
    if not expression and not named:
        folders.add(Path(os.path.abspath(os.path.join(base_dir, split_plugin(plugin)[0]))).parent)
    watch = watchdog(hung, folders, limit, RewardTimeout, "make it faster or raise `reward.timeout_seconds`")
    model = request.get("model", "")
    samples, held_out = samples_of(request["samples"], model), samples_of(request.get("held_out", []), model)
    function: RewardFunction
    if expression:
        function = compiled(expression, request.get("files", []))
        began()
    else:
        began()
        with watch(f"importing {split_plugin(plugin)[0]}"):
            function = load_reward(plugin, base_dir, kind=kind)
    start = time.monotonic()
    name = f"`{'reward.expression' if expression else split_plugin(plugin)[1]}`"
    with watch(name):
        scores = call_reward(function, samples)
    if held_out:  # held-out rows may have other keys
        try:
            with watch(f"on the first held-out row, {name}"):
                call_reward(function, held_out)
        except RewardError as error:
            error.message = f"on the first held-out row: {error.message}"
            raise
    return {
        "scores": [{"reward": score.reward, "metrics": dict(score.metrics)} for score in scores],
        "parts": any(score.token_rewards or score.steps for score in scores),
        "files": [] if expression else local_files(folders),
        "plugins": packages_of([plugin], kind) if named else [],
        "seconds": time.monotonic() - start,
    }


async def _boxed_call(request: Json, limits: BoxLimits, began: Callable[[], None]) -> Json:
    """The same call by a probe in a box, as the run makes it."""
    check_host(limits)
    inner: Json = {name: value for name, value in request.items() if name not in ("sandbox", "model", "evaluates")} | {
        "in_box": True
    }
    for name in ("samples", "held_out"):
        each = request.get(name, [])
        ids = [list(sample.token_ids) for sample in samples_of(each, request.get("model", ""))]
        inner[name] = [{**sample, "token_ids": tokens} for sample, tokens in zip(each, ids, strict=True)]
    calls = 2 + bool(inner["held_out"])
    began()
    start = time.monotonic()
    async with Sandboxes() as server:
        result = await server.run(
            limits.spec(binds_of(request["plugin"], request["base_dir"])),
            [sys.executable, "-m", "rollout.probe"],
            stdin=json.dumps({"reward": inner}).encode(),
            env=box_environment(),
            wall_time_s=START_SECONDS + calls * float(request["timeout_seconds"]),
            output_bytes=limits.output_bytes,
        )
    sys.stderr.buffer.write(result.stderr)
    answer = _last_json(result.stdout)
    if "reward" not in answer:
        raise ended(result, limits, f"`{split_plugin(request['plugin'])[1]}`", result.stderr)
    if found := answer["reward"].get("error"):
        place = Place(found["file"], found["line"], found["column"], found["text"]) if found.get("file") else None
        error = PluginError(found["message"], fix=found["fix"], place=place)
        error.__dict__["reason"] = found["reason"]
        raise reported(error)
    return answer["reward"] | {"seconds": time.monotonic() - start}


def _last_json(text: bytes) -> Json:
    try:
        return json.loads(text)
    except ValueError:
        return {}


def watchdog(
    hung: Callable[[Any], None], folders: set[Path], limit: float, error: type[RolloutError], fix: str
) -> Callable[[str], AbstractContextManager[None]]:
    """A function that watches a block of this thread, named by its text. ``hung`` gets an error,
    from another thread, if the block takes longer than ``limit`` seconds."""
    caller = threading.get_ident()

    @contextlib.contextmanager
    def watch(what: str) -> Generator[None]:
        def report() -> None:
            frame = sys._current_frames()[caller]  # pyright: ignore[reportPrivateUsage]
            place = last_of(traceback.extract_stack(frame), folders)
            hung(error(f"{what} took longer than {limit:g} s", fix=fix, place=place))

        timer = threading.Timer(limit, report)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    return watch


def samples_of(samples: list[Json], model: str) -> list[Sample]:
    """The samples, with tokens if the tokenizer of the model can be read."""
    ids: list[list[int]] = [[] for _ in samples]
    if model and samples:
        with contextlib.suppress(BadModel):  # another part reports it
            tokenizer = tokenizer_of(Path(model))
            texts = [sample["completion"] for sample in samples]
            ids = [encoded.ids for encoded in tokenizer.encode_batch(texts, add_special_tokens=False)]
    return [
        Sample(s["prompt"], s["completion"], s["row"], s.get("token_ids", tokens)) for s, tokens in zip(samples, ids, strict=True)
    ]


def compiled(text: str, files: list[Json]) -> RewardFunction:
    """Compile an expression and check that the rows have its fields. Raises ``ExpressionError``."""
    from rollout.expression import Expression

    expression = Expression(text)
    for use in expression.fields:
        for file in files:
            if not use.guarded:
                check_field(use, file)
    return expression


def check_field(use: FieldUse, file: Json) -> None:
    """Raises ``ExpressionError`` if a row lacks a field that the expression uses without a
    check."""
    from rollout.expression import ExpressionError

    for number, row in enumerate(rows(file["path"]), 1):
        if use.name in row:
            continue
        near = difflib.get_close_matches(use.name, row, n=1)
        fix = f"did you mean `{near[0]}`?" if near else f"the row has {', '.join(f'`{name}`' for name in row)}"
        if number > 1:
            fix = f"check the field first: `has(row.{use.name}) ? ... : 0.0`"
        place = Place("reward.expression", use.line, use.column)
        raise ExpressionError(f"row {number} of {file['name']} has no `{use.name}`", fix=fix, place=place)


def last_of(frames: traceback.StackSummary, folders: set[Path]) -> Place | None:
    """The innermost frame in the user's folders."""
    for frame in reversed(frames):
        if is_local(Path(frame.filename), folders):
            text = (frame.line or "").strip()
            return Place(frame.filename, frame.lineno or 0, 1 + _indent(frame.filename, frame.lineno), text)
    return None


def _indent(filename: str, number: int | None) -> int:
    line = linecache.getline(filename, number or 0)
    return len(line) - len(line.lstrip())


def packages_of(plugins: list[str], kind: str) -> list[Json]:
    """The installed packages of plugins of a kind, as a plan pins them. Raises
    ``PluginNotInstalled``."""
    return [asdict(package(plugin, kind)) | {"kind": kind} for plugin in plugins if is_installed(plugin)]


def local_files(folders: set[Path]) -> list[str]:
    """Source files of loaded modules in the user's folders, sorted."""
    found: set[str] = set()
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file and name.partition(".")[0] not in ("rollout", "__main__") and is_local(Path(file), folders):
            found.add(os.path.abspath(file))
    return sorted(found)


def is_local(path: Path, folders: set[Path]) -> bool:
    """Whether a source file belongs to the user, not to an installed package."""
    if "site-packages" in path.parts or path.is_relative_to(PACKAGE):
        return False
    return path.suffix == ".py" and any(path.is_relative_to(folder) for folder in folders)
