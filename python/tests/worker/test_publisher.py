"""A published payload is stored exactly once, even if the connection is lost."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import cast

import pytest
from nats.aio.client import Client
from nats.errors import NoRespondersError
from nats.js.api import RetentionPolicy, StreamConfig

from rollout_testing.daemon import Daemon
from rollout_testing.proxy import Proxy
from rollout_testing.run import RunStreams
from rollout_testing.waiting import until
from rollout_workers.worker import bus
from rollout_workers.worker.bus import connect
from rollout_workers.worker.credential import Token
from rollout_workers.worker.publisher import Publisher
from rollout_workers.worker.spec import Identity


async def test_stores_with_headers(daemon: Daemon, who: Identity, streams: RunStreams) -> None:
    client = await connect(daemon.nats_url, Token(daemon.token), name="test")
    publisher = Publisher(client, who.trajectory_subject, who.trajectory_stream, who.process)
    await publisher.publish(b"payload", {"traceparent": "00-1-2-01"})
    message = await streams.js.get_last_msg(f"TRAJ_{who.run}", who.trajectory_subject)
    assert message.data == b"payload"
    assert message.headers == {"traceparent": "00-1-2-01", "Nats-Msg-Id": f"{who.process}/1"}
    assert publisher.most_bytes == (8 << 20) - 4096
    await client.close()


async def test_waits_for_the_stream(daemon: Daemon, who: Identity) -> None:
    client = await connect(daemon.nats_url, Token(daemon.token), name="test")
    publisher = Publisher(client, who.trajectory_subject, who.trajectory_stream, who.process)
    publishing = asyncio.create_task(publisher.publish(b"payload", {}))
    js = client.jetstream()
    await js.account_info()  # a round trip, after which the first attempt has failed
    assert not publishing.done()
    await js.add_stream(
        StreamConfig(name=f"TRAJ_{who.run}", subjects=[who.trajectory_subject], retention=RetentionPolicy.WORK_QUEUE)
    )
    await publishing
    assert (await js.stream_info(f"TRAJ_{who.run}")).state.messages == 1
    await client.close()


async def test_a_cut_connection_stores_once(daemon: Daemon, who: Identity, streams: RunStreams) -> None:
    proxy = await Proxy(daemon.nats_url).start()
    client = await connect(proxy.url, Token(daemon.token), name="test")
    publisher = Publisher(client, who.trajectory_subject, who.trajectory_stream, who.process)
    await publisher.publish(b"0", {})
    publishing = [asyncio.create_task(publisher.publish(b"%d" % n, {})) for n in range(1, 20)]
    await asyncio.sleep(0)
    proxy.cut()
    proxy.fix()
    await asyncio.gather(*publishing)
    assert (await streams.js.stream_info(f"TRAJ_{who.run}")).state.messages == 20
    await client.close()
    await proxy.stop()


class TwoServers:
    """A connection to two servers. The first reports no responders; the second stores messages."""

    servers: tuple[str, ...] = ("first", "second")
    moves = 0

    async def request(self, subject: str, payload: bytes, **options: object) -> SimpleNamespace:
        if not self.moves:
            raise NoRespondersError
        return SimpleNamespace(data=b'{"stream": "TRAJ", "seq": 1}')

    async def force_reconnect(self) -> None:
        self.moves += 1


async def test_moves_to_another_server_if_the_first_has_no_responders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bus, "_ELECTION_SECONDS", 0.2)
    client = TwoServers()
    await Publisher(cast(Client, client), "subject", "TRAJ", "process").publish(b"payload", {})
    assert client.moves == 1


async def test_keeps_the_connection_if_there_is_no_other_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bus, "_ELECTION_SECONDS", 0.0)
    client = TwoServers()
    client.servers = ("first",)
    publishing = asyncio.create_task(Publisher(cast(Client, client), "subject", "TRAJ", "process").publish(b"payload", {}))
    await asyncio.wait([publishing], timeout=0.5)
    assert not publishing.done()
    assert not client.moves
    publishing.cancel()


async def test_a_lost_connection_is_a_warning_unless_the_process_is_shutting_down(
    daemon: Daemon, caplog: pytest.LogCaptureFixture
) -> None:
    proxy = await Proxy(daemon.nats_url).start()
    stays = await connect(proxy.url, Token(daemon.token), name="stays")
    leaves = await connect(proxy.url, Token(daemon.token), name="leaves", leaving=lambda: True)
    proxy.cut()
    await until(lambda: not stays.is_connected and not leaves.is_connected)
    await until(lambda: any("lost the connection" in record.getMessage() for record in caplog.records))
    assert [r.getMessage() for r in caplog.records if "lost" in r.getMessage()] == [
        "lost the connection to NATS (stays); reconnecting"
    ]
    await stays.close()
    await leaves.close()
    await proxy.stop()
