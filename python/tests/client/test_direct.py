"""A stream over a plain socket, against gRPC's own server and against peers that are none."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

import grpc
import pytest

from rollout.client.buffer import direct as direct_module
from rollout.client.buffer.direct import Broken, Direct

TOKEN = (("authorization", "Bearer " + "x" * 300),)
Answer = Callable[[Iterator[bytes], grpc.ServicerContext], Iterator[bytes]]


@contextlib.contextmanager
def served(answer: Answer) -> Iterator[str]:
    """The address of a server whose method /s/M answers so."""

    class Handler(grpc.GenericRpcHandler):
        def service(self, handler_call_details: Any) -> Any:
            if handler_call_details.method != "/s/M" or TOKEN[0] not in handler_call_details.invocation_metadata:
                return None
            return grpc.stream_stream_rpc_method_handler(answer)

    server = grpc.server(ThreadPoolExecutor(2), handlers=[Handler()], options=[("grpc.max_receive_message_length", 1 << 30)])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


def echo(requests: Iterator[bytes], _: grpc.ServicerContext) -> Iterator[bytes]:
    for request in requests:
        yield request[::-1]


def test_what_is_sent_comes_and_so_do_the_answers() -> None:
    """Sizes around those of frames and windows, more in all than either side grants at once."""
    sizes = [0, 1, 16_379, 16_384, 65_535, 70_000, 3_000_000, 0, 12_000_000, 9_000_000]
    messages = [bytes((n,)) * size + b"end" for n, size in enumerate(sizes)] + [b""]
    with served(echo) as address:
        got = list(Direct(address, "/s/M", TOKEN).exchange(iter(messages)))
    assert got == [message[::-1] for message in messages]


def test_answers_come_while_requests_go_on() -> None:
    with served(echo) as address:
        release = threading.Semaphore(0)

        def requests() -> Iterator[bytes]:
            for n in range(300):
                yield b"%d" % n
                release.acquire()

        for n, answer in enumerate(Direct(address, "/s/M", TOKEN).exchange(requests())):
            assert answer == (b"%d" % n)[::-1]
            release.release()
        assert n == 299


def test_the_peer_may_end_the_stream() -> None:
    def refuse(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        yield next(requests)
        context.abort(grpc.StatusCode.NOT_FOUND, "no such run")

    ended = threading.Event()

    def requests() -> Iterator[bytes]:
        yield b"first"
        ended.wait(60)
        yield b"late"

    with served(refuse) as address:
        assert list(Direct(address, "/s/M", TOKEN).exchange(requests())) == [b"first"]
        ended.set()
        assert list(Direct(address, "/s/Other", TOKEN).exchange(iter([]))) == []
        assert list(Direct(address, "/s/M", ()).exchange(iter([b"without a token"]))) == []


def frame(kind: int, flags: int, stream: int, body: bytes) -> bytes:
    return len(body).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + body


@pytest.mark.parametrize("closing", [True, False])
@pytest.mark.parametrize(
    "speech",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"HTTP/1.1 400 Bad Request\r\nConnection: keep-alive\r\n\r\n", id="HTTP/1.1"),
        pytest.param(frame(0, 0, 1, b"\1\0\0\0\1x"), id="a compressed message"),
        pytest.param(frame(0, 8, 1, bytes(7)), id="padding"),
        pytest.param(frame(0, 0, 1, b"\0\0\0\0\x09abc"), id="half a message"),
        pytest.param(frame(8, 0, 3, b"\0\0\0\1"), id="a window of another stream"),
        pytest.param(frame(8, 0, 1, b"\0\0\1"), id="half a window"),
        pytest.param(frame(4, 0, 0, b"\0\4\0"), id="half a setting"),
        pytest.param(frame(4, 0, 0, b"") + frame(7, 0, 0, bytes(8)), id="it goes away"),
    ],
)
def test_another_speech_is_an_error(speech: bytes, closing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request is on its way that the peer never takes. closing: or the peer says nothing more and stays."""
    monkeypatch.setattr(direct_module, "_QUIET_SECONDS", 1)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def speak() -> None:
            peer, _ = listener.accept()
            with peer:
                peer.sendall(speech)
                if closing:
                    peer.shutdown(socket.SHUT_WR)
                while peer.recv(1 << 16):
                    pass

        speaker = threading.Thread(target=speak)
        speaker.start()
        direct = Direct(f"127.0.0.1:{listener.getsockname()[1]}", "/s/M", TOKEN)
        with pytest.raises(Broken):
            list(direct.exchange(iter([bytes(1 << 20)])))
        speaker.join(60)
        assert not speaker.is_alive()


def test_a_peer_that_is_only_slow_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC's server answers the pings while its handler works."""
    monkeypatch.setattr(direct_module, "_QUIET_SECONDS", 1)

    def slow(requests: Iterator[bytes], _: grpc.ServicerContext) -> Iterator[bytes]:
        for request in requests:
            time.sleep(3.5)
            yield request

    with served(slow) as address:
        assert list(Direct(address, "/s/M", TOKEN).exchange(iter([b"late"]))) == [b"late"]


def test_what_fails_in_the_requests_ends_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    told: SimpleQueue[Any] = SimpleQueue()
    monkeypatch.setattr(threading, "excepthook", lambda args: told.put(args.exc_type))

    def requests() -> Iterator[bytes]:
        yield b"first"
        raise RuntimeError("of the caller's")

    with served(echo) as address, pytest.raises(OSError):
        list(Direct(address, "/s/M", TOKEN).exchange(requests()))
    assert told.get(timeout=60) is RuntimeError


def test_it_answers_pings_and_sends_no_more_than_the_peer_grants() -> None:
    """A peer that grants 5 bytes after 3, by settings and by both windows, and ends the stream with the answer."""

    said: list[tuple[int, int, bytes]] = []  # type, flags and body of what the client sent
    settled = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def peer() -> None:
            connection, _ = listener.accept()
            with connection, connection.makefile("rb") as heard:

                def hear(kind: int, flags: int) -> bytes:
                    while True:
                        head = heard.read(9)
                        body = heard.read(int.from_bytes(head[:3], "big"))
                        said.append((head[3], head[4], body))
                        if (head[3], head[4]) == (kind, flags):
                            return body

                assert heard.read(24) == b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
                connection.sendall(frame(4, 0, 0, b"\0\4\0\0\0\3") + frame(6, 0, 0, b"12345678"))
                hear(4, 1)
                settled.set()
                hear(0, 0)
                connection.sendall(frame(6, 0, 0, b"87654321") + frame(8, 0, 1, b"\0\0\0\2"))
                hear(0, 0)
                connection.sendall(frame(6, 0, 0, b"00000000") + frame(4, 0, 0, b"\0\4\0\2\0\0"))
                connection.sendall(frame(8, 0, 0, b"\0\1\0\0"))
                hear(0, 1)
                connection.sendall(frame(0, 1, 1, b"\0\0\0\0\2ok"))

        speaker = threading.Thread(target=peer)
        speaker.start()

        def wait() -> Iterator[bytes]:
            assert settled.wait(60)
            yield bytes(100_000)

        direct = Direct(f"127.0.0.1:{listener.getsockname()[1]}", "/s/M", TOKEN)
        assert list(direct.exchange(wait())) == [b"ok"]
        speaker.join(60)
        assert not speaker.is_alive()
    data = [body for kind, _, body in said if kind == 0]
    assert b"".join(data) == b"\0" + (100_000).to_bytes(4, "big") + bytes(100_000)
    assert [len(body) for body in data[:2]] == [3, 2] and max(map(len, data)) == 16_384
    assert [body for kind, _, body in said if kind == 6] == [b"12345678", b"87654321", b"00000000"]


@pytest.mark.parametrize("address", ["dns:///host:1", "unix:/tmp/socket", "host", "host:port", "::1:50", "[::1]", "host:99999"])
def test_other_addresses_are_grpcs(address: str) -> None:
    with pytest.raises(ValueError, match="host:port"):
        Direct(address, "/s/M", ())
