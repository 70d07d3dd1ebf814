"""Plays episodes in the environments of a rollout rank: the policy chooses for all rows at once,
and a row whose episode ends gets the next one."""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import logging
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rollout.environment import Result
from rollout_workers.multistep.engine import PolicyEngine
from rollout_workers.multistep.episodes import LOST, TIMEOUT
from rollout_workers.multistep.errors import BatchInvalid, EnvironmentSilent
from rollout_workers.multistep.link import CommandLink
from rollout_workers.multistep.policy import Policy, Prediction
from rollout_workers.multistep.worker import Mode, MultiStepRolloutWorker

log = logging.getLogger(__name__)

_POLICY = "POLICY_FAILED"
_PROBES = 32
_ARRAYS = frozenset({torch.float32, torch.float64, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool})


Turn = Mapping[str, np.ndarray[Any, Any]]
"""Of all rows, whose episodes share it: small tensors, because rows of arrays are taken several
times faster than tensors are copied."""
_MOST_SHARED = 4096  # bytes of a row: a turn is kept until the last of its episodes ends


@dataclass(slots=True, eq=False)
class Played:
    """An episode. T chunks of C actions were chosen with weights ``versions`` [T].

    tensors: as in ``rollout.trajectory.v1.Trajectory``, set at the end of an episode that did not
    fail.
    """

    key: str
    sample: int
    seed: int
    reset: Mapping[str, Any]
    result: Result | None = None
    tensors: dict[str, Tensor] = field(default_factory=dict)
    versions: list[int] = field(default_factory=list)
    steps: int = 0
    since: float = field(default_factory=time.time)
    chunks: list[tuple[Turn, int, Mapping[str, Tensor]]] = field(default_factory=list)
    """Until the end: of each chunk, the turn in which it was played, its row, and its tensors that
    the turn does not have."""


class ByRow:
    """A policy whose rows do not depend on each other: an action depends on the observation and a
    seed alone, to the bit. ``wanted`` are the rows to compute, with their seeds; the results of
    other rows mean nothing.

    A policy whose ``predict_action_batch`` takes ``seeds`` computes all rows together, if on some
    random numbers its results do not depend on a row's place. Otherwise each row is computed alone,
    after ``torch.manual_seed``.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._together: bool | None = None if "seeds" in inspect.signature(policy.predict_action_batch).parameters else False
        self.wanted: dict[int, int] = {}

    def __getattr__(self, name: str) -> Any:
        if name in ("value_head", "q_head"):  # which the rollout worker looks for
            return getattr(self._policy, name)
        raise AttributeError(name)

    def predict_action_batch(self, env_obs: Mapping[str, Any], mode: str) -> tuple[Any, Prediction]:
        """See :class:`Policy`."""
        rows = len(next(value for value in env_obs.values() if value is not None))
        if self._together is None:
            self._together = self._placeless(env_obs, rows)
            if not self._together:
                log.warning("the policy's results depend on the place of a row in a batch: rows are computed one by one")
        if self._together:
            return self._all(env_obs, mode, [self.wanted.get(row, 0) for row in range(rows)])
        parts: dict[int, tuple[Any, Prediction]] = {}
        for row, seed in self.wanted.items():
            torch.manual_seed(seed)
            parts[row] = self._policy.predict_action_batch(_row(env_obs, row), mode)
        common = next(iter(parts.values()))
        chosen = [parts.get(row, common) for row in range(rows)]
        return torch.cat([torch.as_tensor(one[0]) for one in chosen]), _joined([one[1] for one in chosen])

    def _all(self, env_obs: Mapping[str, Any], mode: str, seeds: Sequence[int]) -> tuple[Any, Prediction]:
        return self._policy.predict_action_batch(env_obs, mode, seeds=torch.tensor(seeds))  # type: ignore[call-arg]

    def _placeless(self, env_obs: Mapping[str, Any], rows: int) -> bool:
        """Whether each of some rows has the same results at all places of a batch. All processes
        try the same numbers: those of a first batch may differ between places in one process, and
        not in another one."""
        for probe in range(_PROBES):
            numbers = torch.Generator().manual_seed(probe)
            repeated = _repeated(env_obs, probe % rows, rows, numbers)
            actions, prediction = self._all(repeated, "train", [1 + probe] * rows)
            results = [torch.as_tensor(actions), *_leaves(prediction)]
            if not all(torch.equal(result, result[:1].expand_as(result)) for result in results):
                return False
        return True


def _repeated(observations: Mapping[str, Any], row: int, rows: int, numbers: torch.Generator) -> dict[str, Any]:
    """A batch whose rows are all the same, with random numbers in tensors of floats."""

    def repeat(value: Any) -> Any:
        if isinstance(value, Mapping):
            return _repeated(value, row, rows, numbers)
        if isinstance(value, Tensor):
            one = value[row : row + 1]
            if one.is_floating_point():
                one = torch.randn(one.shape, generator=numbers).to(one)
            return one.expand(rows, *value.shape[1:]).contiguous()
        return value if value is None else [value[row]] * rows

    return {key: repeat(value) for key, value in observations.items()}


def _leaves(prediction: Mapping[str, Any]) -> Iterator[Tensor]:
    for value in prediction.values():
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, Mapping):
            yield from _leaves(value)


def _row(observations: Mapping[str, Any], row: int) -> dict[str, Any]:
    return {
        key: value if value is None else _row(value, row) if isinstance(value, Mapping) else value[row : row + 1]
        for key, value in observations.items()
    }


def _joined(parts: Sequence[Mapping[str, Any]]) -> Any:
    return {
        key: torch.cat([part[key] for part in parts]) if isinstance(value, Tensor) else _joined([part[key] for part in parts])
        for key, value in parts[0].items()
        if value is not None
    }


class Player:
    """Plays the episodes that ``play`` is called for. ``run`` must run; all methods belong to one
    event loop."""

    def __init__(
        self,
        worker: MultiStepRolloutWorker,
        link: CommandLink,
        engine: PolicyEngine,
        *,
        by_row: ByRow | None,
        mode: Mode = "train",
    ) -> None:
        """worker: with the policy, or with ``by_row`` if equal episodes must have equal bits. Its
        peers in the mode are those of ``link``. mode: with ``eval`` the most likely actions are
        taken, and episodes have no tensors."""
        self._worker, self._link, self._engine, self._by_row = worker, link, engine, by_row
        self._mode: Mode = mode
        self._rows: list[Played | None] = [None] * engine.slots
        self._waiting: deque[Played] = deque()
        self._ended: dict[Played, asyncio.Future[None]] = {}
        self._wake = asyncio.Event()
        self._over: list[int] = []  # rows whose episode ended without their environment's knowledge
        if mode == "train":
            engine.counts = self._counts

    async def play(self, episode: Played) -> Played:
        """Play an episode to its end. A cancelled call stops it."""
        done = self._ended[episode] = asyncio.get_running_loop().create_future()
        self._waiting.append(episode)
        self._wake.set()
        try:
            await done
            return episode
        finally:
            del self._ended[episode]
            if episode.result is None:
                self._drop(episode)

    def open(self) -> list[Played]:
        """The episodes that have not ended."""
        return list(self._ended)

    async def run(self) -> None:
        """Play until cancelled. A failure ends the open episodes, and the next ones are tried."""
        batch: dict[str, Any] | None = None
        while True:
            if not self._waiting and not any(self._rows):
                self._wake.clear()
                await self._wake.wait()
            try:
                batch = await self._turn(batch)
            except EnvironmentSilent as error:
                batch = self._fail_all(TIMEOUT, str(error))
            except Exception as error:
                log.exception("a turn of %d environments failed", len(self._rows))
                batch = self._fail_all(getattr(error, "reason", "") or _POLICY, f"{type(error).__name__}: {error}")

    async def _turn(self, batch: dict[str, Any] | None) -> dict[str, Any]:
        """Choose actions for the rows with an episode, begin episodes in the others, and receive
        what the environments answer."""
        worker, link = self._worker, self._link
        acting = [row for row, episode in enumerate(self._rows) if episode is not None]
        resets: dict[int, Mapping[str, Any]] = {}
        for row, episode in enumerate(self._rows):
            if episode is None and self._waiting:
                started = self._rows[row] = self._waiting.popleft()
                started.since = time.time()
                resets[row] = started.reset
        prediction: Prediction | None = None
        version = 0
        chosen: Any = None
        if acting and batch is not None:
            self._seed(acting)
            observations = batch["obs"]
            (chosen, prediction), version = await self._engine.act(lambda: worker.predict(observations, self._mode))
        link.begin()
        link.resets, link.ended, self._over = resets, self._over, []
        if prediction is None:
            link.send_resets()
        else:
            worker.send_chunk_actions(link, chosen, self._mode)
        received = await worker.recv_env_output(link, self._mode)
        if prediction is not None:
            await self._record(received, prediction, version, acting)
        for row, (reason, message) in link.failures.items():
            self._failed(row, reason, message)
        return received

    def _seed(self, rows: Sequence[int]) -> None:
        if self._by_row is not None:
            episodes = [(row, self._rows[row]) for row in rows]
            self._by_row.wanted = {row: _mixed(e.seed, len(e.chunks)) for row, e in episodes if e is not None}

    async def _record(self, received: dict[str, Any], prediction: Prediction, version: int, acting: Sequence[int]) -> None:
        played, ended, truncated = torch.cat(self._link.played), received["dones"].any(-1), received["truncations"].any(-1)
        tensors = await self._trained(received, prediction) if self._mode == "train" else {}
        turn, own = _shared({**tensors, "played": played, "earned": received["rewards"]})
        steps, over, cut = played.sum(-1).tolist(), ended.tolist(), truncated.tolist()
        for row in acting:
            episode = self._rows[row]
            if episode is None or row in self._link.failures:
                continue
            episode.chunks.append((turn, row, {name: tensor[row].clone() for name, tensor in own.items()}))
            episode.versions.append(version)
            episode.steps += steps[row]
            self._engine.played += steps[row] if self._mode == "train" else 0
            if over[row]:
                self._rows[row] = None
                self._end(episode, cut[row])

    async def _trained(self, received: dict[str, Any], prediction: Prediction) -> dict[str, Tensor]:
        """What the learner needs of a turn, of all rows."""
        worker, dones, rewards = self._worker, received["dones"], received["rewards"]
        if dones.any():  # the policy may have to value the last observations
            (dones, rewards), _ = await self._engine.act(lambda: worker.get_dones_and_rewards(received))
        assert rewards is not None
        inputs, logprobs, values = (prediction.get(key) for key in ("forward_inputs", "prev_logprobs", "prev_values"))
        if not isinstance(inputs, dict) or not isinstance(logprobs, Tensor) or not isinstance(values, Tensor):
            raise BatchInvalid(
                "the policy must return `prev_logprobs`, `prev_values`, and `forward_inputs`",
                fix="docs/multistep.md lists what a policy returns",
            )
        tensors = {f"inputs.{name}": tensor for name, tensor in inputs.items()}
        return tensors | {"logprobs": logprobs, "values": values, "rewards": rewards, "dones": dones}

    def _end(self, episode: Played, truncated: bool) -> None:
        shared, _, own = episode.chunks[0]
        stacked = {name: torch.from_numpy(np.stack([turn[name][row] for turn, row, _ in episode.chunks])) for name in shared}
        stacked |= {name: torch.stack([each[name] for _, _, each in episode.chunks]) for name in own}
        earned = stacked.pop("earned")
        episode.tensors, episode.chunks = stacked if self._mode == "train" else {}, []
        outcome = "truncated" if truncated else "completed"
        episode.result = Result(reward=float(earned.double().sum()), metrics={"steps": float(episode.steps)}, outcome=outcome)
        self._finish(episode)

    def _failed(self, row: int, reason: str, message: str) -> None:
        episode = self._rows[row]
        self._rows[row] = None
        if episode is None:
            return
        if reason == LOST:  # from its beginning, in the new process
            episode.chunks, episode.versions, episode.steps = [], [], 0
            self._waiting.appendleft(episode)
            return
        episode.result = Result(outcome="infra_failed", reason=reason, message=message)
        self._finish(episode)

    def _fail_all(self, reason: str, message: str) -> None:
        self._worker.drop_received(self._mode)
        for row, episode in enumerate(self._rows):
            if episode is not None:
                self._failed(row, reason, message)
                self._over.append(row)

    def _finish(self, episode: Played) -> None:
        done = self._ended.get(episode)
        if done is not None and not done.done():
            done.set_result(None)

    def _drop(self, episode: Played) -> None:
        if episode in self._waiting:
            self._waiting.remove(episode)
        for row, held in enumerate(self._rows):
            if held is episode:
                self._rows[row] = None
                self._over.append(row)

    def _counts(self) -> tuple[int, int]:
        return sum(episode is not None for episode in self._rows), len(self._waiting)


def _shared(tensors: Mapping[str, Tensor]) -> tuple[Turn, dict[str, Tensor]]:
    """Copies of the tensors that a turn shares, and the others."""
    turn: dict[str, np.ndarray[Any, Any]] = {}
    own: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.dtype in _ARRAYS and tensor.nbytes <= _MOST_SHARED * len(tensor):
            turn[name] = tensor.detach().cpu().clone().numpy()
        else:
            own[name] = tensor
    return turn, own


def _mixed(seed: int, turn: int) -> int:
    """A seed for one turn of an episode, 63 bits."""
    digest = hashlib.blake2b(seed.to_bytes(8, "little") + turn.to_bytes(8, "little"), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
