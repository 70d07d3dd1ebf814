"""Leases batches of complete groups, reads their samples, and commits them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import crc32c

from rollout.buffer.v1 import buffer_pb2 as pb
from rollout.client.buffer.calls import call
from rollout.client.buffer.sample import PayloadCorrupt, Sample, parse
from rollout.client.errors import remote_errors
from rollout.errors import RolloutError

_WAIT_SECONDS = 20.0


class NotReady(RolloutError):
    """The batch was not complete in time. The message says what is missing and which component
    provides it."""

    reason: ClassVar[str] = "BATCH_NOT_READY"


class Leased:
    """The batch of one step. groups: the samples of each group, in order. batch: keys and rewards
    from the buffer."""

    def __init__(self, stub: Any, metadata: tuple[tuple[str, str], ...], batch: pb.Batch, groups: list[list[Sample]]) -> None:
        self._stub, self._metadata = stub, metadata
        self.batch, self.groups = batch, groups

    @property
    def step(self) -> int:
        return self.batch.step

    def commit(self, weights_digest: str = "", *, trim: bool = False) -> pb.StepRecord:
        """Record the groups as consumed. Durable when it returns. May be repeated.

        weights_digest: of the weights after the step, ``blake3-<hex>``; default: the batch id, for
        programs that train nothing. trim: also allow the buffer to delete the payloads of the steps
        up to this one, as ``Buffer.trim`` does.
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
    """Iterate over it, or call :meth:`lease`. Not safe for concurrent use."""

    def __init__(self, stub: Any, metadata: tuple[tuple[str, str], ...], run: str, *, first: int, steps: int) -> None:
        self._stub, self._metadata, self._run = stub, metadata, run
        self._first, self._steps = first, steps

    def __iter__(self) -> Iterator[Leased]:
        """Yield batch after batch. Commit each batch before the next one is leased."""
        step = self._first
        while not self._steps or step < self._first + self._steps:
            try:
                yield self.lease(step)
            except NotReady:
                continue
            step += 1

    def lease(self, step: int, *, wait_seconds: float = _WAIT_SECONDS) -> Leased:
        """The batch of a step; repeated calls return the same batch. Raises :class:`NotReady`,
        :class:`PayloadCorrupt`, ``RemoteError``."""
        request = pb.LeaseBatchRequest(run_id=self._run, step=step, wait_seconds=wait_seconds)
        answer = call(self._stub.LeaseBatch, request, self._metadata)
        if not answer.HasField("batch"):
            raise NotReady(f"step {step} waits for {'; '.join(wait.evidence for wait in answer.waits)}")
        batch: pb.Batch = answer.batch
        groups: dict[tuple[int, int], list[Sample]] = {}
        for ref, payload in zip(batch.samples, self._read(batch), strict=True):
            groups.setdefault((ref.key.epoch, ref.key.index), []).append(_verified(ref, payload))
        return Leased(self._stub, self._metadata, batch, list(groups.values()))

    def _read(self, batch: pb.Batch) -> list[bytes]:
        payloads: list[bytes] = []
        with remote_errors():
            request = pb.ReadPayloadsRequest(run_id=batch.run_id, step=batch.step)
            for chunk in self._stub.ReadPayloads(request, metadata=self._metadata):
                payloads.extend(chunk.payloads)
        if len(payloads) != len(batch.samples):
            raise PayloadCorrupt(f"step {batch.step}: the buffer sent {len(payloads)} payloads for {len(batch.samples)} samples")
        return payloads


def _verified(ref: pb.SampleRef, payload: bytes) -> Sample:
    if crc32c.crc32c(payload) != ref.crc32c:
        key = ref.key
        where = f"{ref.segment or ref.payload_ref} at byte {ref.offset}"
        raise PayloadCorrupt(
            f"sample {key.sample} of group {key.epoch}/{key.index} of {key.run_id} does not match its recorded checksum ({where})"
        )
    return parse(payload)
