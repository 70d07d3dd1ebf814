"""Puts groups of samples into the buffer."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, Self

import crc32c

from rollout.buffer.v1 import buffer_pb2 as pb
from rollout.client.buffer.calls import call
from rollout.client.buffer.sample import Sample, encode
from rollout.trajectory.v1.trajectory_pb2 import TrajectoryBatch, TrajectoryEnvelope, TrajectoryHeader, TrajectoryKey
from rollout.weights.v1.weights_pb2 import WeightsReceipt

_REQUEST_BYTES = 32 << 20  # payload bytes of a request, after which the next put gets another request


class Put(Future[pb.PutResult]):
    """``result()`` returns when the samples are durable. It reports how many were accepted,
    duplicates, or refused, and why. A put can't be cancelled, because it may already have been
    sent."""

    def cancel(self) -> bool:
        return False


@dataclass(slots=True, eq=False)
class _Pending:
    """A put that has no answer yet. size: payload bytes."""

    batch: TrajectoryBatch
    size: int
    done: Put = field(default_factory=Put)


class Producer:
    """Puts samples of one run, from any thread. The end of its ``with`` block waits for all puts.

    A thread sends the puts. Puts that arrive during a request are sent together in the next one.
    """

    def __init__(self, stub: Any, metadata: tuple[tuple[str, str], ...], run: str, *, in_flight: int) -> None:
        """in_flight: maximum number of puts without an answer; as many again may be queued. Raises
        ``ValueError`` if it is below 1."""
        if in_flight < 1:
            raise ValueError(f"in_flight is {in_flight}, expected at least 1")
        self._stub, self._metadata, self._run, self._in_flight = stub, metadata, run, in_flight
        self._slots = 2 * in_flight
        self._free = threading.Semaphore(self._slots)
        # Held by the thread that takes slots: two threads with some slots each would wait for each
        # other.
        self._draining = threading.Lock()
        self._closed = False  # written while all slots are taken
        self._queue: SimpleQueue[_Pending | None] = SimpleQueue()  # None ends the thread
        self._thread = threading.Thread(target=self._send, name="put", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def put(
        self,
        index: int,
        samples: Sequence[Sample],
        *,
        epoch: int = 0,
        attempt: int = 0,
        first: int = 0,
        group_size: int = 0,
        receipt: WeightsReceipt | None = None,
    ) -> Put:
        """Put the samples of group ``index`` of an epoch. The arrays may be changed when this
        returns.

        first: number of the first sample within the group. group_size: samples in the complete
        group; default: those given. receipt: the weights that the engine used. attempt: a sample
        that is refused or that failed dissolves its group; put the group's samples again with a
        higher attempt. Samples of a lower attempt count as duplicates. Blocks while ``2 *
        in_flight`` puts are unanswered. Raises ``ValueError`` for arrays that do not fit each other
        and after ``close``. Other errors are raised by ``result()``.
        """
        key = TrajectoryKey(run_id=self._run, epoch=epoch, index=index, attempt=attempt)
        size = group_size or len(samples)
        envelopes = [_envelope(sample, key, number, size, receipt) for number, sample in enumerate(samples, first)]
        pending = _Pending(TrajectoryBatch(trajectories=envelopes), sum(len(envelope.payload) for envelope in envelopes))
        self._free.acquire()
        if self._closed:
            self._free.release()
            raise ValueError("the producer is closed")
        self._queue.put(pending)
        return pending.done

    def flush(self) -> None:
        """Wait until every put is durable or has failed."""
        self._drain()

    def close(self) -> None:
        """Wait for every put, and refuse new ones. Failed puts raise in ``result()``. May be called
        more than once."""
        if self._drain(close=True):
            self._queue.put(None)
            self._thread.join()

    def _drain(self, *, close: bool = False) -> bool:
        """Wait until all slots are free. Returns whether this call closed the producer."""
        with self._draining:
            for _ in range(self._slots):
                self._free.acquire()
            closes = close and not self._closed
            self._closed |= close
            self._free.release(self._slots)
        return closes

    def _send(self) -> None:
        """Send the queued puts until the end. Runs in the producer's thread."""
        while (first := self._queue.get()) is not None:
            puts = self._gather(first)
            request = pb.PutTrajectoriesRequest(run_id=self._run, puts=[pending.batch for pending in puts])
            try:
                results = call(self._stub.PutTrajectories, request, self._metadata).results
                if len(results) != len(puts):
                    raise ConnectionError(f"the buffer answered {len(results)} of {len(puts)} puts")
            except BaseException as error:
                for pending in puts:
                    pending.done.set_exception(error)
            else:
                for pending, result in zip(puts, results, strict=True):
                    pending.done.set_result(result)
            self._free.release(len(puts))

    def _gather(self, first: _Pending) -> list[_Pending]:
        """The puts of the next request: what is queued, up to ``in_flight`` puts and
        ``_REQUEST_BYTES``."""
        puts, size = [first], first.size
        while len(puts) < self._in_flight and size < _REQUEST_BYTES:
            try:
                pending = self._queue.get_nowait()
            except Empty:
                break
            if pending is None:
                self._queue.put(None)
                break
            puts.append(pending)
            size += pending.size
        return puts


def _envelope(
    sample: Sample, group: TrajectoryKey, number: int, group_size: int, receipt: WeightsReceipt | None
) -> TrajectoryEnvelope:
    about, tokens = sample.about, len(sample.token_ids)
    group.sample, group.part = number, about.key.part
    payload = encode(sample, group)
    header = TrajectoryHeader(
        key=group,
        group_size=group_size,
        outcome=about.outcome,
        reason=about.reason,
        reward=about.reward,
        receipt=receipt,
        tokens=tokens,
        completion_tokens=tokens - about.prompt_tokens,
    )
    if versions := [span.version for span in about.version_spans]:
        header.min_version, header.max_version = min(versions), max(versions)
    return TrajectoryEnvelope(header=header, payload=payload, crc32c=crc32c.crc32c(payload))
