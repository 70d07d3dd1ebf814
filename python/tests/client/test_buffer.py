"""Producer and consumer against a rolloutd."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from rollout.client import RemoteError
from rollout.client.buffer import Buffer, Ledger, NotReady, Sample, connect
from rollout_testing.daemon import Daemon

SIZE = 4


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    options = ["--buffer-segment-bytes", "200000"]
    started = Daemon(tmp_path / "state", targets="nats,registry,buffer", options=options).start()
    yield started
    started.stop()


@pytest.fixture
def buffer(daemon: Daemon) -> Iterator[Buffer]:
    with connect(state=daemon.state) as connected:
        connected.open("r", Ledger(group_size=SIZE, groups_per_step=2, rows=100, in_order=True))
        yield connected


def group(number: int, tokens: int = 50) -> list[Sample]:
    ids = np.arange(tokens, dtype=np.int32)
    return [Sample(ids + 1000 * number + n, np.full(tokens, -n, np.float32), np.ones(tokens, np.uint8)) for n in range(SIZE)]


def same(got: list[Sample], want: list[Sample]) -> bool:
    return len(got) == len(want) and all(
        np.array_equal(a.token_ids, b.token_ids)
        and np.array_equal(a.logprobs, b.logprobs)
        and np.array_equal(a.loss_mask, b.loss_mask)
        for a, b in zip(got, want, strict=True)
    )


def test_groups_arrive_complete_and_once(buffer: Buffer) -> None:
    sizes = [50, 20_000, 3, 9_000, 1, 60_000]  # several segments
    with buffer.producer("r", in_flight=3) as producer:
        puts = [producer.put(n, group(n, tokens)) for n, tokens in enumerate(sizes)]
        duplicate = producer.put(0, group(0, 50))
    assert [put.result().accepted for put in puts] == [SIZE] * len(sizes)
    assert duplicate.result().duplicates == SIZE
    for batch in buffer.consumer("r", steps=3):
        for got in batch.groups:
            number = got[0].about.key.index
            assert same(got, group(number, sizes[number]))
        record = batch.commit()
        assert (record.step, record.groups) == (batch.step, 2)
        assert batch.commit().chain == record.chain  # it may be repeated
    with pytest.raises(NotReady, match="external producers"):
        buffer.consumer("r").lease(4, wait_seconds=0)


def test_arrays_may_change_after_a_put(buffer: Buffer) -> None:
    samples = group(0)
    with buffer.producer("r") as producer:
        for n in range(2):
            samples[0].token_ids[0] = n
            producer.put(n, samples)
    batch = buffer.consumer("r").lease(1)
    assert [got[0].token_ids[0] for got in batch.groups] == [0, 1]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_puts_survive_a_restart_of_the_buffer(daemon: Daemon, buffer: Buffer, how: signal.Signals) -> None:
    with buffer.producer("r", in_flight=4) as producer:
        first = producer.put(0, group(0, 2_000)).result()
        daemon.stop(how)
        later = [producer.put(n, group(n, 50 if n == 2 else 2_000)) for n in (1, 2, 3)]
        daemon.start()
        assert first.accepted == SIZE
        for put in later:
            result = put.result(60)
            assert result.accepted + result.duplicates == SIZE
        assert producer.put(1, group(1, 2_000)).result(60).duplicates == SIZE
    for batch in buffer.consumer("r", steps=2):
        assert all(same(got, group(n := got[0].about.key.index, 50 if n == 2 else 2_000)) for got in batch.groups)
        batch.commit()


def test_damaged_payloads_are_never_returned(buffer: Buffer) -> None:
    with buffer.producer("r") as producer:
        for n in range(2):
            producer.put(n, group(n))
    batch = buffer.consumer("r").lease(1).batch
    ref = batch.samples[5]
    path = Path(ref.segment)
    damaged = bytearray(path.read_bytes())
    damaged[ref.offset + 60] ^= 4
    path.write_bytes(damaged)
    with pytest.raises(RemoteError) as caught:
        buffer.consumer("r").lease(1)
    assert caught.value.reason == "PAYLOAD_LOST"
    assert caught.value.metadata["group"] == "0/1" and caught.value.metadata["offset"] == str(ref.offset)


def test_refusals_name_the_sample(buffer: Buffer) -> None:
    samples = group(0)
    with buffer.producer("r") as producer:
        result = producer.put(0, samples, group_size=SIZE + 1).result()
        assert {refused.reason for refused in result.refused} == {"GROUP_SIZE_MISMATCH"}
        with pytest.raises(RemoteError) as caught:
            buffer.producer("no-such-run").put(0, samples).result(60)
        assert caught.value.reason == "LEDGER_NOT_FOUND"
        with pytest.raises(ValueError, match="expected"):
            producer.put(1, [Sample(np.zeros(3))])  # type: ignore[arg-type]
        for n in (1, 2, 3):  # the producer still works
            producer.put(n, group(n))


def test_a_closed_producer_refuses_puts(buffer: Buffer) -> None:
    producer = buffer.producer("r")
    put = producer.put(0, group(0))
    producer.close()
    producer.close()
    assert put.result(60).accepted == SIZE
    with pytest.raises(ValueError, match="closed"):
        producer.put(1, group(1))
    with pytest.raises(ValueError, match="in_flight"):
        buffer.producer("r", in_flight=0)


def test_many_threads_may_flush(buffer: Buffer) -> None:
    with buffer.producer("r", in_flight=2) as producer, ThreadPoolExecutor(8) as pool:
        for n in range(40):
            producer.put(n, group(n))
            assert all(future.result(60) is None for future in [pool.submit(producer.flush) for _ in range(8)])


def test_trim_frees_consumed_payloads(buffer: Buffer) -> None:
    with buffer.producer("r") as producer:
        for n in range(6):
            producer.put(n, group(n, 20_000)).result()  # one segment per group
    for batch in buffer.consumer("r", steps=3):
        batch.commit()
    assert buffer.trim("r", 3) > 1_000_000
