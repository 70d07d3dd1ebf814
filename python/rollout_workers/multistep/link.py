"""What a rollout rank and its environment ranks say to each other, over the ``Channel`` port."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import queue
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from rollout_workers.multistep.channel import Channel
from rollout_workers.multistep.episodes import LOST, TIMEOUT, EpisodeRank
from rollout_workers.multistep.errors import ChannelFull, PeerLost
from rollout_workers.multistep.ranks import Peer, channel_key

T = TypeVar("T")
log = logging.getLogger(__name__)

REPEAT_SECONDS = 1.0
"""How long a rollout rank waits for an answer before it sends its command again."""
_MOST_REPEAT_SECONDS = 8.0


class CommandLink:
    """The rollout rank's side. It is the channel that :class:`MultiStepRolloutWorker` sends actions
    to and receives batches from, and adds what the environment ranks need besides actions.

    Set ``resets`` and ``ended``, by row of all peers, before each turn. After the batches of a turn
    are received, ``played`` and ``failures`` have what happened in them.
    """

    def __init__(
        self,
        commands: Channel,
        answers: Channel,
        rank: int,
        peers: Sequence[Peer],
        *,
        repeat_seconds: float,
        mode: str = "train",
    ) -> None:
        """repeat_seconds: how long to wait for an answer before the command is sent again;
        doubled each time, up to 8 s."""
        self.resets: dict[int, Mapping[str, Any]] = {}
        self.ended: list[int] = []
        self.played: list[Any] = []
        self.failures: dict[int, tuple[str, str]] = {}
        self._commands, self._answers, self._repeat = commands, answers, repeat_seconds
        self._sender, self._turn = secrets.token_hex(8), 0
        self._hosts: dict[str, str] = {}  # by key of the answers
        self._sent: dict[str, tuple[str, dict[str, Any]]] = {}  # by key of the answers: key and command
        self._first: dict[str, int] = {}
        self._rows: dict[str, int] = {}
        self._ranks = {channel_key(peer.rank, rank, mode): peer.rank for peer in peers}
        self._silent: dict[str, float] = {}  # by key of the answers: since when, seconds since 1970
        first = 0
        for peer in peers:
            key = channel_key(peer.rank, rank, mode)
            self._first[key], self._rows[key] = first, peer.rows
            first += peer.rows
        self._out = {channel_key(rank, peer.rank, mode): channel_key(peer.rank, rank, mode) for peer in peers}

    def silent(self) -> dict[int, float]:
        """The environment ranks that have not answered and show no life, and when the command was
        sent, in seconds since 1970."""
        return {self._ranks[key]: since for key, since in self._silent.items()}

    def begin(self) -> None:
        """Begin the next turn."""
        self._turn += 1
        self.played, self.failures = [], {}

    def send_resets(self) -> None:
        """Send a turn without actions."""
        for key in self._out:
            self.put(None, key)

    def put(self, item: Any, key: str) -> None:
        back = self._out[key]
        first, rows = self._first[back], self._rows[back]
        command = {
            "sender": self._sender,
            "turn": self._turn,
            "resets": {row - first: how for row, how in self.resets.items() if first <= row < first + rows},
            "ended": [row - first for row in self.ended if first <= row < first + rows],
            "actions": item,
        }
        self._sent[back] = key, command
        self._commands.put(command, key)

    async def get(self, key: str) -> Any:
        answer = await self._answer(key)
        first, rows = self._first[key], self._rows[key]
        self.failures |= {first + row: failure for row, failure in answer["failures"].items()}
        host = self._hosts.setdefault(key, answer["host"])
        if host != answer["host"]:  # another process, which knows only the episodes that began in this turn
            self._hosts[key] = answer["host"]
            log.warning("another process answers for %s; its open episodes begin again", key)
            lost = {first + row: (LOST, "the environment worker was restarted") for row in range(rows)}
            self.failures = {row: why for row, why in lost.items() if row not in self.resets} | self.failures
        self.played.append(answer["played"])
        return answer["batch"]

    async def _answer(self, key: str) -> Any:
        """The answer to the command of this turn, which is sent again until it arrives."""
        repeat, asked = self._repeat, time.time()
        try:
            while True:
                try:
                    async with asyncio.timeout(repeat):
                        answer = await self._answers.get(key)
                except (TimeoutError, PeerLost) as error:
                    if isinstance(error, PeerLost):  # another process will take its place
                        self._silent.setdefault(key, asked)
                    repeat = min(2 * repeat, _MOST_REPEAT_SECONDS)
                    out, command = self._sent[key]
                    with contextlib.suppress(ChannelFull):  # the next process takes what the channel holds
                        self._commands.put(command, out)
                    continue
                if answer["turn"] == self._turn and answer["sender"] == self._sender:
                    return answer
        finally:
            self._silent.pop(key, None)


async def host_episodes(
    rank: EpisodeRank,
    commands: Channel,
    answers: Channel,
    own: int,
    peer: int,
    *,
    limit_seconds: float = math.inf,
    mode: str = "train",
) -> None:
    """Answer the commands of one rollout rank until cancelled. own: the environment rank. peer: the
    rollout rank.

    A turn may last ``limit_seconds``. Then the episode whose environment computes has failed, and a
    fresh rank in a new thread answers, in which the others begin again.
    """
    thread, replaced = _DaemonThread(), False
    try:
        while True:
            try:
                command = await commands.get(channel_key(peer, own, mode))
            except PeerLost:  # it may not have started, or another process takes its place
                continue
            failures: dict[int, tuple[str, str]] = {}
            while True:
                try:
                    async with asyncio.timeout(limit_seconds if limit_seconds < math.inf else None):
                        answer = await thread.call(rank.answer, command)
                    break
                except TimeoutError:
                    stuck = rank.playing
                    if stuck is not None:
                        failures[stuck] = TIMEOUT, f"the environment did not answer within {limit_seconds:g} s"
                        command = {**command, "resets": {row: how for row, how in command["resets"].items() if row != stuck}}
                    log.warning("an environment did not answer within %g s; new ones replace those of this worker", limit_seconds)
                    thread = _DaemonThread()  # the other one ends with its call
                    rank, replaced = await thread.call(rank.fresh), True
            if answer is not None:
                answer["failures"].update(failures)  # also of a repeated answer
                answers.put({**answer, "sender": command["sender"]}, channel_key(own, peer, mode))
    finally:
        thread.end()
        if replaced:
            rank.close()


class _DaemonThread:
    """Makes calls one after the other in a thread that does not keep the process alive, which those
    of an executor do."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="environments", daemon=True).start()

    def call(self, function: Callable[..., T], *arguments: Any) -> asyncio.Future[T]:
        """The result of a call, which is made also if the future is cancelled."""
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()
        self._calls.put((future, function, arguments))
        return asyncio.wrap_future(future)

    def end(self) -> None:
        """End the thread after the calls that were made."""
        self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            future, function, arguments = call
            try:
                future.set_result(function(*arguments))
            except BaseException as error:
                future.set_exception(error)
