"""The effects of the proxy's faults on connections."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
from collections.abc import Iterator

import pytest
from proxy import Link, Proxy, trouble
from servers import free_ports


@pytest.fixture
def link() -> Iterator[Link]:
    """A link to a server that returns what it receives."""
    listener = socket.create_server(("127.0.0.1", 0))
    proxy = Proxy()

    def echo(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            while data := connection.recv(1 << 16):
                connection.sendall(data)

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=echo, args=(connection,), daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield proxy.link("echo", ("127.0.0.1", next(free_ports())), ("127.0.0.1", listener.getsockname()[1]))
    finally:
        proxy.stop()
        listener.close()


def connect(link: Link) -> socket.socket:
    return socket.create_connection(link.listen, timeout=10)


def answer(connection: socket.socket, data: bytes) -> bytes:
    connection.sendall(data)
    got = b""
    while len(got) < len(data) and (piece := connection.recv(1 << 16)):
        got += piece
    return got


def test_forwards_all_data(link: Link) -> None:
    data = random.Random(1).randbytes(1 << 20)
    with connect(link) as connection:
        threading.Thread(target=connection.sendall, args=(data,), daemon=True).start()
        got = b""
        while len(got) < len(data):
            got += connection.recv(1 << 16)
    assert got == data


def test_drops_and_refuses_connections(link: Link) -> None:
    with connect(link) as connection:
        assert answer(connection, b"before") == b"before"
        link.refuse()
        with pytest.raises(ConnectionResetError):
            connection.recv(1)
    with contextlib.suppress(ConnectionError), connect(link) as connection:
        assert answer(connection, b"refused") == b""
    link.heal()
    with connect(link) as connection:
        assert answer(connection, b"after") == b"after"


def test_holds_data_until_healed(link: Link) -> None:
    with connect(link) as connection:
        assert answer(connection, b"before") == b"before"
        link.hold()
        connection.sendall(b"held")
        connection.settimeout(0.3)
        with pytest.raises(TimeoutError):
            connection.recv(4)
        connection.settimeout(10)
        link.heal()
        assert connection.recv(4) == b"held"


def test_cuts_a_connection_inside_a_message(link: Link) -> None:
    with connect(link) as connection:
        assert answer(connection, b"x") == b"x"
        link.cut(1000)
        connection.sendall(b"y" * 4000)
        with pytest.raises(ConnectionResetError):
            while connection.recv(4000):
                pass
    with connect(link) as connection:
        assert answer(connection, b"z" * 4000) == b"z" * 4000


def test_half_closes_connections(link: Link) -> None:
    with connect(link) as connection:
        assert answer(connection, b"before") == b"before"
        link.half_close(to_server=False)
        assert connection.recv(1) == b""  # the connection as the server's client sees it


def test_every_random_fault_can_be_healed(link: Link) -> None:
    for seed in range(40):
        trouble(link, random.Random(seed))
        link.heal()
    with connect(link) as connection:
        assert answer(connection, b"whole") == b"whole"
