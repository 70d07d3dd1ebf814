"""Leases batches of whole groups, reads their samples, commits them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import crc32c

from rollout.buffer.v1 import buffer_pb2 as pb
from rollout.client.buffer.calls import call
from rollout.client.buffer.sample import PayloadCorrupt, Sample, parse
from rollout.client.buffer.segment import SegmentReader
from rollout.client.errors import remote_errors
from rollout.errors import RolloutError

_WAIT_SECONDS = 20.0
_RANGE_BYTES = 32 << 20  # of one file that are read or mapped at once


class NotReady(RolloutError):
    """A batch that was not complete in time; the message says what it waits for and who owns that."""

    reason: ClassVar[str] = "BATCH_NOT_READY"


class Leased:
    """The batch of one step. groups: each group's samples in order. batch: places, keys and rewards as the buffer has them."""

    def __init__(self, stub: Any, metadata: tuple[tuple[str, str], ...], batch: pb.Batch, groups: list[list[Sample]]) -> None:
        self._stub, self._metadata = stub, metadata
        self.batch, self.groups = batch, groups

    @property
    def step(self) -> int:
        return self.batch.step

    def commit(self, weights_digest: str = "", *, trim: bool = False) -> pb.StepRecord:
        """Record the groups as consumed, for ever; it may be repeated. Durable when it returns.

        weights_digest: of the weights after the step, ``blake3-<hex>``; where nothing was trained the batch's own id stands
        for it. trim: the payloads of this step and those before are not needed again, as ``Buffer.trim`` would say afterwards.
        """
        request = pb.CommitStepRequest(
            run_id=self.batch.run_id,
            step=self.batch.step,
            batch_id=self.batch.batch_id,
            weights_digest=weights_digest or self.batch.batch_id,
            trim=trim,
        )
        return call(self._stub.CommitStep, request, self._metadata).step


class Consumer:
    """Iterate over it, or call :meth:`lease`. One thread at a time."""

    def __init__(self, stub: Any, metadata: tuple[tuple[str, str], ...], run: str, *, first: int, steps: int) -> None:
        self._stub, self._metadata, self._run = stub, metadata, run
        self._first, self._steps = first, steps
        self._files = SegmentReader()

    def __iter__(self) -> Iterator[Leased]:
        """Batch after batch. The next one is leased once the last is committed."""
        step = self._first
        while not self._steps or step < self._first + self._steps:
            try:
                yield self.lease(step)
            except NotReady:
                continue
            step += 1

    def lease(self, step: int, *, wait_seconds: float = _WAIT_SECONDS) -> Leased:
        """The batch of a step, the same one each time. Raises :class:`NotReady`, :class:`PayloadCorrupt`, ``RemoteError``."""
        request = pb.LeaseBatchRequest(run_id=self._run, step=step, wait_seconds=wait_seconds)
        answer = call(self._stub.LeaseBatch, request, self._metadata)
        if not answer.HasField("batch"):
            raise NotReady(f"step {step} waits for {answer.waiting_for}")
        batch: pb.Batch = answer.batch
        refs = list(batch.samples)
        groups: list[list[Sample]] = []
        last: tuple[int, int] | None = None
        for ref, sample in zip(refs, self._read(batch, refs), strict=True):
            key = ref.key
            if (group := (key.epoch, key.index)) != last:
                groups.append([])
                last = group
            groups[-1].append(sample)
        return Leased(self._stub, self._metadata, batch, groups)

    def _read(self, batch: pb.Batch, refs: list[pb.SampleRef]) -> list[Sample]:
        """The samples of a batch in its order: from the files where they can be read and are whole, else through the buffer."""
        try:
            return self._read_files(refs)
        except (OSError, PayloadCorrupt):
            payloads = self._fetch(batch)
        return [_checked(ref, memoryview(payload)) for ref, payload in zip(refs, payloads, strict=True)]

    def _read_files(self, refs: list[pb.SampleRef]) -> list[Sample]:
        places = sorted([(ref.segment, ref.offset, ref.length, i) for i, ref in enumerate(refs)])
        if places and not places[0][0]:
            raise OSError("a payload is in the storage service")
        self._files.keep({place[0] for place in places})
        out: list[Sample | None] = [None] * len(refs)
        for path, begin, end, indices in _ranges(places):
            data = self._files.read(path, begin, end - begin)
            for i, offset, length in indices:
                out[i] = _checked(refs[i], data[offset - begin : offset - begin + length])
        return [sample for sample in out if sample is not None]

    def _fetch(self, batch: pb.Batch) -> list[bytes]:
        payloads: list[bytes] = []
        with remote_errors():
            request = pb.ReadPayloadsRequest(run_id=batch.run_id, step=batch.step)
            for chunk in self._stub.ReadPayloads(request, metadata=self._metadata):
                payloads.extend(chunk.payloads)
        if len(payloads) != len(batch.samples):
            raise PayloadCorrupt(f"step {batch.step}: the buffer sent {len(payloads)} payloads for {len(batch.samples)} samples")
        return payloads


def _ranges(places: Sequence[tuple[str, int, int, int]]) -> Iterator[tuple[str, int, int, list[tuple[int, int, int]]]]:
    """Places (path, offset, length, index), sorted, as few ranges: path, begin, end, (index, offset, length) of what is in it."""
    held: list[tuple[int, int, int]] = []
    path, begin, end = "", 0, 0
    for at, offset, length, i in places:
        if held and (at != path or offset - end > 4096 or offset + length - begin > _RANGE_BYTES):
            yield path, begin, end, held
            held = []
        if not held:
            path, begin = at, offset
        held.append((i, offset, length))
        end = offset + length
    if held:
        yield path, begin, end, held


def _checked(ref: pb.SampleRef, payload: memoryview) -> Sample:
    if crc32c.crc32c(payload) != ref.crc32c:
        key = ref.key
        where = f"{ref.segment or ref.payload_ref} at byte {ref.offset}"
        raise PayloadCorrupt(
            f"sample {key.sample} of group {key.epoch}/{key.index} of {key.run_id} has another checksum than recorded ({where})"
        )
    return parse(payload)
