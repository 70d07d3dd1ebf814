"""Describes what the groups of a worker wait for, when someone asks."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rollout.hosting.kernel import BLOCKED
from rollout.hosting.look import Look, looks
from rollout.hosting.supervised import Condition
from rollout.wait.v1.wait_pb2 import Wait
from rollout_workers.environments.limits import Limits
from rollout_workers.inference.puller import Puller
from rollout_workers.inference.sampler import Failure, RowSender, Sampler
from rollout_workers.worker.calls import Calls
from rollout_workers.worker.spec import Identity

_MOST_POSITIONS = 32
_MOST_FAILURES = 8
_LOOK_SECONDS = 1.0  # of a call, after which its process is asked for the line
_METHODS = {"REWARD_CALL": ("Reward", "Load"), "TOOL_CALL": ("CallTool",)}  # of environments: the others
_SLOW_SECONDS = 10.0  # without a token, after which the engine counts as hanging


class Doing(NamedTuple):
    """What happens to one group. name: of the reward, the tool, or the environment. since: seconds
    since 1970. limit: in seconds; 0: none."""

    doing: str
    name: str
    since: float
    limit: float


@dataclass(frozen=True, slots=True)
class InFlight:
    """Reads the parts of a worker. They keep no record for this: nothing is computed until
    ``waits`` is called.

    speed: tokens per second of the engine. version: of the weights it serves. held_out: what is
    done for each held-out row (:meth:`Evaluation.doing`).
    """

    who: Identity
    puller: Puller
    consumer: Sampler | RowSender
    calls: Calls
    limits: Limits
    speed: Callable[[], float]
    version: Callable[[], int]
    held_out: Callable[[], list[tuple[tuple[str, float], bytes]]] = list

    async def looks(self) -> list[Look]:
        """What the processes of user code do that have not answered a call for a second."""
        return await looks(_LOOK_SECONDS)

    def waits(self, looked: Sequence[Look] = ()) -> list[Wait]:
        """What the groups wait for now, the longest first. Groups for which the same is done are
        one wait. What an evaluation does longest, why groups failed, and a publish that fails, come
        last and name no groups that wait. looked: what processes of user code do
        (:meth:`looks`)."""
        now, monotonic = time.time(), time.monotonic()
        found: dict[int, Doing] = {}
        held, active = self.puller.waiting_items(), self.puller.active_items()
        for item, outdated in held:
            found[item.group.position] = Doing("WEIGHTS" if outdated else "SLOT", "", now - (monotonic - item.arrived), 0.0)
        episodes = self.consumer.doing()
        unsent = self.consumer.unsent()
        for item in active:
            arrived = now - (monotonic - item.arrived)
            if item.key in unsent:
                found[item.group.position] = Doing("PUBLISH", "", unsent[item.key], 0.0)
            elif item.key in episodes:
                found[item.group.position] = self._of_episode(episodes[item.key], item.group.row_json)
            else:
                found[item.group.position] = Doing("PREPARE", "", arrived, 0.0)
        waits = [*self._joined(found), *self._evaluating()]
        for wait in waits:
            _add_look(wait, looked)
        return [*waits, *self._plugins(found.values()), *self._failed(), *self._refused()]

    def _failed(self) -> list[Wait]:
        """Why groups failed here, the newest failure first."""
        same: dict[tuple[str, str], list[tuple[int, Failure]]] = {}
        for position, failure in self.consumer.failures():
            same.setdefault((failure.reason, _without_numbers(failure.message)), []).append((position, failure))
        newest = sorted(same.values(), key=lambda failures: -max(failure.since for _, failure in failures))
        return [self._failure(failures) for failures in newest[:_MOST_FAILURES]]

    def _failure(self, failures: list[tuple[int, Failure]]) -> Wait:
        positions = sorted(position for position, _ in failures)
        newest = max((failure for _, failure in failures), key=lambda failure: failure.since)
        count = sum(failure.count for _, failure in failures)
        wait = Wait(
            owner="reward" if newest.reason.startswith("REWARD_") else self.limits.name,
            reason=newest.reason or "SAMPLES_FAILED",
            evidence=f"{_times(count)} on {self.who.worker}, the last one {elapsed(time.time() - newest.since)} ago: "
            + (newest.message or newest.reason),
            fix="correct this cause, and the next attempt succeeds; if that changes a file of the plan, cancel the run and "
            f"continue in a new one: `rollout run --config FILE --from {self.who.run} --continue`",
            subjects=[self.who.worker],
            positions=positions[:_MOST_POSITIONS],
            failures=count,
        )
        wait.since.FromMilliseconds(int(newest.since * 1000))
        if newest.reason.startswith("PLUGIN_") and (condition := self._named_in(newest.message)) is not None:
            wait.owner, wait.reason, wait.fix = condition.name, condition.reason, condition.fix
            if condition.text not in wait.evidence:
                wait.evidence += f"; the sidecar {condition.name}: {condition.text}"
        return wait

    def _named_in(self, message: str) -> Condition | None:
        """What is wrong with the sidecar that the message of a failure names."""
        return next((found for found in self.calls.conditions().values() if f"`{found.name}`" in message), None)

    def _plugins(self, found: Iterable[Doing]) -> list[Wait]:
        """What is wrong with sidecars that no group waits for now."""
        named = {doing.name for doing in found if doing.doing.startswith("PLUGIN_")}
        return [
            self._wait(Doing(condition.reason, name, condition.since, 0.0))
            for name, condition in self.calls.conditions().items()
            if name not in named
        ]

    def _evaluating(self) -> list[Wait]:
        """What the held-out prompts wait for. Those that the engine has may wait for a slot, so
        that an idle engine is the cause only if nothing else computes."""
        found = [self._of_episode(doing, row) for doing, row in self.held_out()]
        if not found:
            return []
        others = [doing for doing in found if doing.doing != "GENERATE"]
        wait = self._wait(min(others if others and not self.speed() else found, key=lambda doing: doing.since))
        wait.evidence += f"; the evaluation waits for {len(found)} held-out prompts"
        wait.fix += "; lower eval.max_prompts makes evaluations shorter, higher eval.every_steps rarer, and with eval.workers "
        wait.fix += "they run next to the training"
        return [wait]

    def _of_episode(self, episode: tuple[str, float], row: bytes) -> Doing:
        doing, since = episode
        if doing.startswith("environment-"):
            return Doing("ENVIRONMENT_WORKER", doing, since, 0.0)
        if doing != "ENVIRONMENT_STEP":
            return Doing(doing, "", since, 0.0)
        call = self.calls.of(row)
        if call is None and not self.limits.turns:
            call = self.calls.oldest("REWARD_CALL")  # of other groups, after which this group's call begins
        if call is not None:
            condition = self.calls.condition(call.name)
            doing = condition.reason if condition is not None and condition.ongoing else call.doing
            return Doing(doing, call.name, call.since, call.limit)
        limit = self.limits.turn_seconds
        return Doing(doing, self.limits.name if self.limits.turns else "", since, 0.0 if math.isinf(limit) else limit)

    def _joined(self, found: dict[int, Doing]) -> list[Wait]:
        same: dict[tuple[str, str, float], list[int]] = {}
        for position, doing in found.items():
            same.setdefault((doing.doing, doing.name, doing.limit), []).append(position)
        joined = [
            self._wait(min((found[position] for position in positions), key=lambda doing: doing.since), positions)
            for positions in same.values()
        ]
        return sorted(joined, key=lambda wait: (wait.since.seconds, wait.since.nanos))

    def _wait(self, oldest: Doing, positions: Iterable[int] = ()) -> Wait:
        positions = sorted(positions)
        owner, evidence, fix = self._words(oldest)
        wait = Wait(
            owner=owner,
            reason=oldest.doing,
            evidence=evidence,
            fix=fix,
            subjects=[self.who.worker],
            limit_seconds=oldest.limit,
            positions=positions[:_MOST_POSITIONS],
            groups=len(positions),
        )
        wait.since.FromMilliseconds(int(oldest.since * 1000))
        return wait

    def _words(self, doing: Doing) -> tuple[str, str, str]:
        """Owner, evidence, and fix."""
        worker, name, passed = self.who.worker, doing.name, time.time() - doing.since
        taken = elapsed(passed) + (f" of {elapsed(doing.limit)}" if doing.limit else "")
        logs = f"`rollout logs worker {self.who.run} {worker}`"
        if doing.doing.startswith("PLUGIN_") and (condition := self.calls.condition(name)) is not None:
            return condition.name, f"the sidecar {condition.name}: {condition.text}", condition.fix
        match doing.doing:
            case "REWARD_CALL":
                return (
                    name or "reward",
                    f"the reward call to {name or 'the reward'} has taken {taken}",
                    f"see why it is slow: {logs}; `rollout plan` calls it alone; after the limit (reward.timeout_seconds) "
                    "the call is ended and repeated",
                )
            case "TOOL_CALL":
                return (
                    name,
                    f"the call of the tool {name} has taken {taken}",
                    f"see why it is slow: {logs}; after the limit (environment.tool_timeout_seconds) the call is ended, "
                    "and the policy reads an error",
                )
            case "TEACHER_CALL":
                return (
                    "teacher",
                    f"the logprobs of the teacher at {name} have taken {taken}, with retries",
                    f"see what it answers with `rollout logs tail {self.who.run} --level warn`; after the retries "
                    "(algorithm.distillation.endpoint.retries) the samples fail and are retried",
                )
            case "ENVIRONMENT_STEP":
                return (
                    name or "environment",
                    f"the environment {name or 'of the run'} has computed a step for {taken}",
                    f"see why it is slow: {logs}; after the limit (environment.turn_timeout_seconds) the samples fail "
                    "and are retried",
                )
            case "ENVIRONMENT_WORKER":
                return (
                    name,
                    f"{name} has not answered for {taken}",
                    f"see its output: `rollout logs worker {self.who.run} {name}`; a worker that is lost is restarted, and its "
                    "open episodes begin again",
                )
            case "GENERATE":
                speed = self.speed()
                hangs = speed == 0 and passed > _SLOW_SECONDS
                return (
                    worker,
                    f"the engine has generated for {taken}"
                    + (f", at {speed:.0f} tokens a second" if speed else ", and made no token in the last seconds"),
                    f"see why the engine makes no token: {logs}; after limits.stall_seconds the worker is restarted, and its "
                    "groups move to another one"
                    if hangs
                    else "it ends by itself; fewer `sampling.max_tokens`, or more inference workers (engine.workers), make it "
                    "shorter",
                )
            case "PUBLISH":
                return (
                    "nats",
                    f"the samples are finished, and NATS or the storage service has not accepted them for {taken}",
                    "check that NATS and storage run and have space: `rollout status`, `rollout doctor`",
                )
            case "WEIGHTS":
                return (
                    "learner-controller",
                    f"{worker} has weights version {self.version()} and waits for newer ones, for {taken}",
                    f"see why they are not delivered: `rollout logs tail {self.who.run} "
                    "--kind weights.left_out,weights.delivered`",
                )
            case "SLOT":
                return (
                    worker,
                    f"the groups wait for a free slot of the engine, for {taken}",
                    "more slots (engine.slots) or more inference workers (engine.workers) make it shorter",
                )
        return (
            "buffer",
            f"{worker} asks the buffer which samples it has, for {taken}",
            "check that the buffer runs: `rollout status`",
        )

    def _refused(self) -> list[Wait]:
        failure = self.consumer.refused()
        if failure is None:
            return []
        wait = Wait(
            owner="user" if failure.full else "storage",
            reason="DISK_FULL" if failure.full else "PUBLISH_REFUSED",
            evidence=f"the samples of {self.who.worker} are not accepted, and sampled again: {failure.message}",
            fix=failure.fix or "free some space on that disk; the run continues by itself"
            if failure.full
            else "see the error in the log of the storage service, and with `rollout doctor`",
            subjects=[self.who.worker],
        )
        wait.since.FromMilliseconds(int(failure.since * 1000))
        return [wait]


def _add_look(wait: Wait, looks: Sequence[Look]) -> None:
    """Add the process and the line that the longest call of a wait executes."""
    methods = _METHODS.get(wait.reason, ())
    of_environment = wait.reason == "ENVIRONMENT_STEP"
    found = next((each for each in looks if each.method in methods or (of_environment and "Environment" in each.method)), None)
    if found is None:
        return
    wait.process = found.pid
    who = f"its process {found.pid}" if found.pid else "its process in the sandbox"
    if found.at is None and not found.pid and not found.does:
        return
    if found.at is not None:
        wait.location = f"{found.at.file}:{found.at.line}"
        source = f", `{found.at.source}`" if found.at.source else ""
        and_does = f"{',' if source else ''} and {found.does}" if found.does else ""
        wait.evidence += f"; {who} is at {found.at}{source}{and_does}"
    else:
        wait.evidence += f"; {who} {found.does}" if found.does else f"; in process {found.pid}"
    limit = wait.fix.rpartition("; after the limit ")[2] if "; after the limit " in wait.fix else ""
    line = f"correct {found.at}" if found.at is not None else "see why it is slow"
    fixes = [found.fix or line]
    if found.pid and not found.does.startswith(BLOCKED):  # no signal ends that
        fixes.append(f"`kill -9 {found.pid}` ends the call now, and its groups are tried again")
    wait.fix = "; ".join([*fixes, *([f"after the limit {limit}"] if limit else [])])


_NUMBER = re.compile(r"\d+")


def _without_numbers(message: str) -> str:
    """The message of a failure, such that failures that differ in a number only are the same."""
    return _NUMBER.sub("0", message)


def _times(count: int) -> str:
    return "an attempt failed" if count == 1 else f"{count} attempts failed"


def elapsed(seconds: float) -> str:
    """A duration for people: seconds up to two minutes, then minutes, then hours."""
    if seconds < 120:
        return f"{max(0.0, seconds):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
