"""Runs the checks of a plugin, each with a verdict."""

from __future__ import annotations

import asyncio
import json
import math
import os
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from rollout.errors import RolloutError
from rollout.hosting.manifest import is_manifest, read_manifest
from rollout.plugin import RewardImportError, split_plugin
from rollout.plugin.installed import KINDS, PluginNotInstalled, installed, is_installed, normal
from rollout_plugins.testing.report import CheckFailed, Report, SamplesInvalid, Verdict
from rollout_plugins.testing.subject import Hosted, Json, Subject, samples_folder

SECONDS = 55.0
"""Time of all checks."""
_EXPECTED = {
    "reward": ("reward", "metrics", "token_rewards"),
    "evaluation": ("reward", "metrics", "token_rewards"),
    "tool": ("content", "reason"),
    "environment": ("start", "refused"),
    "advantage": ("advantages",),
    "loss": ("loss",),
}
_EXAMPLES = {
    "reward": '{"prompt": "1+1=", "completion": "2", "row": {"answer": "2"}, "reward": 1.0}',
    "tool": '{"arguments": {"a": 1}, "content": "1"}',
    "environment": '{"row": {"number": 3}, "start": "guess:", "turns": [{"text": "3", "reward": 1.0}]}',
    "data_source": '{"prompt": "1+1=", "answer": "2"}',
    "advantage": '{"rewards": [1.0, 0.0], "groups": [0, 0], "advantages": [0.5, -0.5]}',
    "loss": '{"logprobs": [-1.0], "advantages": [1.0], "loss": -1.0}',
}
_BATCH = 64
_MEMORY_SECONDS, _MEMORY_CALLS, _GROWTH = 2.0, 200, 32 << 20


def test(request: Json, kept: str) -> Json:
    """Answer the request of a test (``rollout_plugins.command``). kept: why this process has a
    network; empty if it has none."""
    plugin, base_dir = request["test"], request["base_dir"]
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    samples = _samples_file(plugin, base_dir, request.get("samples", ""))
    items = _read(samples)
    kind = request.get("kind", "").replace("-", "_") or _kind(plugin, base_dir, items)
    if kind not in KINDS:
        raise SamplesInvalid(f"the kind `{kind}` is unknown", fix=f"write one of: {', '.join(KINDS)}")
    manifest = read_manifest(plugin, base_dir, kind=kind) if is_manifest(plugin) else None
    timeout = float(request.get("timeout") or 10.0)
    if kind in ("advantage", "loss"):
        from rollout_plugins.testing.tensors import InLearner  # torch

        subject: Subject = InLearner(kind, plugin, base_dir)
    else:
        subject = Hosted(kind, split_plugin(plugin)[1], manifest or {"plugin": plugin, "base_dir": base_dir}, timeout)
    limit = manifest.memory_bytes if manifest is not None else 0
    return {"report": asyncio.run(_Session(subject, kind, items, timeout, limit).run(plugin, kept)).json()}


class _Session:
    def __init__(self, subject: Subject, kind: str, samples: list[Json], timeout: float, memory: int) -> None:
        """memory: bytes that its process may have; 0: not stated."""
        self._subject, self._kind, self._timeout, self._memory = subject, kind, timeout, memory
        self._samples = samples
        if kind == "data_source":
            self._items: list[Json] = [{"index": number} for number in range(len(samples))]
        else:
            self._items = samples
        self._verdicts: list[Verdict] = []
        self._began = time.monotonic()

    async def run(self, plugin: str, kept: str) -> Report:
        """kept: why the network was not taken away; empty if it was."""
        if kept:
            self._verdicts.append(Verdict("network", "skip", 0.0, f"it is reachable: {kept}"))
        else:
            self._verdicts.append(Verdict("network", "pass", 0.0, "cut off, and no GPU is visible"))
        try:
            if await self._check("load", self._subject.start):
                for name, check in (("golden", self._golden), ("determinism", self._determinism), ("batches", self._batches)):
                    if not await self._check(name, check):
                        break  # the next ones would fail for the same reason
                await self._check("bad inputs", self._bad_inputs)
                await self._check("timing", self._timing)
                await self._check("memory", self._steady_memory)
        finally:
            await self._subject.close()
        return Report(plugin, self._kind, tuple(self._verdicts), time.monotonic() - self._began)

    async def _check(self, name: str, check: Callable[[], Awaitable[str]]) -> bool:
        start = time.monotonic()
        left = SECONDS - (start - self._began)
        detail, fix = "", ""
        try:
            async with asyncio.timeout(max(0.01, left)):
                detail = await check()
        except TimeoutError:
            detail, fix = (
                f"the checks took longer than {SECONDS:g} s together",
                "make the plugin faster, or give it fewer samples",
            )
        except RolloutError as error:
            where = f"{error.place.file}:{error.place.line}: " if error.place is not None and error.place.line else ""
            reason = "" if isinstance(error, CheckFailed) else f"{error.reason}: "
            detail, fix = f"{reason}{where}{error.message}", error.fix or "see its output above"
        self._verdicts.append(Verdict(name, "fail" if fix else "pass", time.monotonic() - start, detail, fix))
        return not fix

    async def _golden(self) -> str:
        found = await self._subject.answers(self._items)
        for number, (sample, answer) in enumerate(zip(self._samples, found, strict=True), 1):
            for key, want in self._expected(sample):
                if why := _differs(want, answer.get(key)):
                    raise CheckFailed(f"sample {number}: `{key}` is {why}", fix="correct the plugin, or the sample")
        return f"{len(found)} samples"

    def _expected(self, sample: Json) -> list[tuple[str, Any]]:
        """What a sample expects of its answer."""
        if self._kind == "data_source":
            return [("row", sample)]
        expected = [(key, sample[key]) for key in _EXPECTED[self._kind] if key in sample]
        if self._kind == "environment":
            turns = [{key: value for key, value in turn.items() if key != "text"} for turn in sample.get("turns", [])]
            expected += [("turns", turns)] if turns else []
        return expected

    async def _determinism(self) -> str:
        first = await self._subject.answers(self._items)
        again = await self._subject.answers(self._items)
        backwards = list(reversed(await self._subject.answers(list(reversed(self._items)))))
        for what, other in (("the second call", again), ("another order", backwards)):
            for number, (one, two) in enumerate(zip(first, other, strict=True), 1):
                if one != two:
                    raise CheckFailed(
                        f"sample {number}: {_short(one)}, then {_short(two)} in {what}",
                        fix="make it depend on the input alone: no clock, no unseeded random numbers, no state of earlier calls",
                    )
        return "equal in a second call and in another order"

    async def _batches(self) -> str:
        whole = await self._subject.answers(self._items)
        for number, item in enumerate(self._items):
            [alone] = await self._subject.answers([item])
            if why := _differs(whole[number], alone):
                raise CheckFailed(
                    f"sample {number + 1}: alone it is {why}", fix="make an answer independent of the others in its call"
                )
        many = [self._items[at % len(self._items)] for at in range(_BATCH)]
        for at, answer in enumerate(await self._subject.answers(many)):
            if why := _differs(whole[at % len(self._items)], answer):
                raise CheckFailed(
                    f"in a batch of {_BATCH}: answer {at + 1} is {why}", fix="return one answer for each item, in order"
                )
        return f"equal in batches of 1, {len(self._items)}, and {_BATCH}"

    async def _bad_inputs(self) -> str:
        notes: list[str] = []
        for name, item in self._subject.unusual(self._items[0]):
            starts = self._subject.starts
            try:
                await self._subject.answers([item])
                said = "answered"
            except RolloutError as error:
                if isinstance(error, CheckFailed):
                    raise CheckFailed(f"{name}: {error.message}", fix=error.fix) from error
                if error.reason.endswith(("_TIMEOUT", "_BLOCKED")):
                    raise CheckFailed(f"{name}: {error.message}", fix="bound its work by the size of the input") from error
                said = error.reason
            try:
                await self._subject.answers(self._items[:1])
            except RolloutError as error:
                raise CheckFailed(
                    f"after {name} it does not answer: {error.message}", fix="keep its state usable after an error"
                ) from error
            if self._subject.starts != starts:
                raise CheckFailed(f"{name} ended its process", fix="raise an error, or return one, instead of exiting")
            notes.append(f"{name}: {said}")
        return "; ".join(notes)

    async def _timing(self) -> str:
        notes: list[str] = []
        for size in (1, _BATCH):
            items = [self._items[at % len(self._items)] for at in range(size)]
            times: list[float] = []
            end = time.monotonic() + 1.0
            while len(times) < 3 or (time.monotonic() < end and len(times) < 50):
                start = time.perf_counter()
                await self._subject.answers(items)
                times.append(time.perf_counter() - start)
            median = sorted(times)[len(times) // 2]
            if median > self._timeout / 2:
                raise CheckFailed(
                    f"a call of {size} takes {median:.2f} s, more than half of the timeout of {self._timeout:g} s",
                    fix="make it faster, or raise --timeout and the timeout in the configuration",
                )
            notes.append(f"{1e3 * median / size:.3f} ms each in calls of {size}")
        return ", ".join(notes)

    async def _steady_memory(self) -> str:
        many = [self._items[at % len(self._items)] for at in range(_BATCH)]
        for _ in range(3):
            await self._subject.answers(many)
        before, end = _memory(self._subject.pid), time.monotonic() + _MEMORY_SECONDS
        calls = 0
        while calls < _MEMORY_CALLS and time.monotonic() < end:
            await self._subject.answers(many)
            calls += 1
        after = _memory(self._subject.pid)
        if not before or not after:
            return "not measured: this system has no /proc"
        text = f"{after / 1e6:.0f} MB after {calls} calls, {(after - before) / 1e6:+.1f} MB"
        if self._memory and after > self._memory:
            raise CheckFailed(
                f"{text}; the manifest has {self._memory / 1e6:.0f} MB", fix="correct the leak, or raise `memory_bytes`"
            )
        if after - before > _GROWTH:
            raise CheckFailed(f"{text}: it leaks", fix="free what a call has allocated, and bound caches")
        return text


def _kind(plugin: str, base_dir: str, samples: list[Json]) -> str:
    """The kind that a manifest, an entry point, or the samples state."""
    if is_manifest(plugin):
        return read_manifest(plugin, base_dir).kind
    if is_installed(plugin):
        before, _, name = plugin.rpartition(":")
        kinds = {one.kind for one in installed() if one.name == name and one.distribution == normal(before)}
        if len(kinds) == 1:
            return kinds.pop()
        if not kinds:
            raise _not_installed(plugin)
        raise PluginNotInstalled(f"{before} has `{name}` of the kinds {', '.join(sorted(kinds))}", fix="write --kind KIND")
    keys = set(samples[0])
    for kind, has in (
        ("environment", {"turns"}), ("tool", {"arguments"}), ("loss", {"logprobs", "loss"}), ("advantage", {"rewards", "groups"}),
        ("reward", {"completion", "reward"}),
    ):  # fmt: skip
        if has <= keys:
            return kind
    return "data_source"


def _not_installed(plugin: str) -> PluginNotInstalled:
    return PluginNotInstalled(f"no installed package has {plugin}", fix="see `rollout plugin list`")


def _samples_file(plugin: str, base_dir: str, named: str) -> Path:
    if named:
        return Path(base_dir, named)
    name, folder = split_plugin(plugin)[1], samples_folder(plugin, base_dir)
    for path in (folder / f"{name}.samples.jsonl", folder / "samples.jsonl"):
        if path.is_file():
            return path
    if is_manifest(plugin):
        read_manifest(plugin, base_dir)
    elif is_installed(plugin):
        if not any(one.name == name and one.distribution == normal(plugin.rpartition(":")[0]) for one in installed()):
            raise _not_installed(plugin)
    elif not (Path(base_dir) / (file := split_plugin(plugin)[0])).is_file():
        raise RewardImportError(
            f"can't read {file}: there is no such file in {Path(base_dir).absolute()}", fix="correct the path"
        )
    raise SamplesInvalid(
        f"{plugin} has no golden samples: there is no {name}.samples.jsonl or samples.jsonl in {folder}",
        fix=f"write one sample a line, such as {_EXAMPLES['reward']}, or name the file with --samples",
    )


def _read(path: Path) -> list[Json]:
    samples: list[Json] = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SamplesInvalid(f"can't read {path}: {error}", fix="correct --samples") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        sample: Any = None
        with suppress(ValueError):
            sample = json.loads(line)
        if not isinstance(sample, dict):
            raise SamplesInvalid(f"{path}:{number} is not a JSON object", fix=f"write for example {_EXAMPLES['reward']}")
        samples.append(sample)
    if not samples:
        raise SamplesInvalid(f"{path} has no samples", fix=f"write for example {_EXAMPLES['reward']}")
    return samples


def _differs(want: Any, have: Any) -> str:
    """How an answer differs from the expected part of it; empty if it does not."""
    if isinstance(want, dict):
        if not isinstance(have, dict):
            return f"{_short(have)}, expected {_short(want)}"
        return next((f"{why} (`{key}`)" for key, value in want.items() if (why := _differs(value, have.get(key)))), "")
    if isinstance(want, list):
        if not isinstance(have, list) or len(have) != len(want):
            return f"{_short(have)}, expected {_short(want)}"
        return next((why for one, two in zip(want, have, strict=True) if (why := _differs(one, two))), "")
    if isinstance(want, int | float) and not isinstance(want, bool) and isinstance(have, int | float):
        equal = math.isclose(want, have, rel_tol=1e-6, abs_tol=1e-9)
    else:
        equal = want == have
    return "" if equal else f"{_short(have)}, expected {_short(want)}"


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) < 120 else f"{text[:117]}..."


def _memory(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return 0
