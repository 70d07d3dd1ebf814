"""Real servers for services under test: PostgreSQL, Consul, a NATS cluster, and an S3 server, each
with its own folder.

`make servers` builds all except PostgreSQL, which is a package of the system. Each server can be
killed, stopped, and started again with the same folder and port.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from become import become
from mesh import ROOT, until

NODES = 3
START_SECONDS = 60.0
FIRST_PORT, PORTS = 15000, 17000
"""The range of ports for `free_ports`, as in libs/freeport."""
TOOLS = ROOT / ".tools" / "bin"


@dataclass
class Server:
    """One server process. The kernel kills it when this process exits."""

    name: str
    command: list[str]
    log: Path
    ready: Callable[[], bool]
    environment: dict[str, str] = field(default_factory=dict)
    user: str | None = None
    namespace: str | None = None
    data: Path = Path("/nonexistent")
    """The folder of the server's data."""
    process: subprocess.Popen[bytes] | None = None

    def launch(self) -> None:
        """Start the server, without waiting until it serves."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                become(self.command, namespace=self.namespace, user=self.user, tied=True),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                env={"HOME": tempfile.gettempdir(), "PATH": os.environ["PATH"], **self.environment},
                start_new_session=True,
            )

    def start(self) -> None:
        """Start the server and wait until it serves."""
        self.launch()
        self.wait()

    def wait(self) -> None:
        until(lambda: self.serves() or self.left(), f"{self.name} to serve", START_SECONDS)
        if self.left():
            raise AssertionError(f"{self.name} exited while starting:\n{self.log.read_text(errors='replace')[-3000:]}")

    def serves(self) -> bool:
        with contextlib.suppress(OSError, ValueError):
            return self.ready()
        return False

    def left(self) -> bool:
        return self.process is None or self.process.poll() is not None

    def signal(self, number: signal.Signals) -> None:
        """Signal the process and all processes that it started, because PostgreSQL has a process
        per connection."""
        if self.process is None or self.left():
            return
        for pid in (self.process.pid, *children(self.process.pid)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def kill(self) -> None:
        """Kill the server, so that nothing more is written. Idempotent."""
        if self.process is not None:
            self.signal(signal.SIGKILL)
            self.process.wait(10)


@dataclass
class Servers:
    """One server of each kind. The addresses are those for clients."""

    folder: Path
    host: str = "127.0.0.1"
    """The address on which the servers listen."""
    namespace: str | None = None
    """The network namespace with this address."""
    by_name: dict[str, Server] = field(default_factory=dict)
    direct: dict[str, int] = field(default_factory=dict)
    """The port of each server, for the proxies."""
    _data: Path | None = None

    def start(self) -> Servers:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._postgres()
        self._consul()
        self._nats()
        self._s3()
        for server in self.by_name.values():
            server.launch()  # started together, because a cluster needs all its nodes
        for server in self.by_name.values():
            server.wait()
        return self

    def start_bucket(self) -> Servers:
        """Start S3 alone."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._s3()
        self.by_name["s3"].start()
        return self

    def stop(self) -> None:
        for server in self.by_name.values():
            server.kill()
        if self._data is not None:
            shutil.rmtree(self._data, ignore_errors=True)

    def configuration(self, port: Callable[[str], int], shared: Path) -> str:
        """A rolloutd.toml with these servers. port: the port for clients of a server, by its
        name."""
        nats = ",".join(f"nats://{self.host}:{port(f'nats-{n}')}" for n in range(NODES))
        token = self.folder / "token"
        token.write_text("5ec2e7" * 10 + "\n")
        token.chmod(0o600)
        return f"""
token_file = "{token}"
shared_dir = "{shared}"
[nats]
url = "{nats}"
token = "file:{token}"
[consul]
address = "{self.host}:{port("consul")}"
[database]
url = "postgres://rollout@{self.host}:{port("postgres")}/postgres?sslmode=disable"
{self.bucket(port("s3"))}"""

    def bucket(self, port: int) -> str:
        """The part of a rolloutd.toml with the bucket. port: the one for clients."""
        secret = self.folder / "secret"
        secret.write_text("chaos-secret-key\n")
        secret.chmod(0o600)
        return f"""
[blob]
url = "s3://rollout/mesh"
endpoint = "http://127.0.0.1:{port}"
access_key = "chaos"
secret_key = "file:{secret}"
"""

    def _add(self, name: str, command: list[str], ready: Callable[[], bool], **more: Any) -> None:
        self.by_name[name] = Server(name, command, self.folder / f"{name}.log", ready, namespace=self.namespace, **more)

    def _postgres(self) -> None:
        binaries = postgres_binaries()
        self._data = Path(tempfile.mkdtemp(prefix="rollout-postgres-"))  # other users can't access the folder of a test
        user = self.postgres_user()
        if user:
            shutil.chown(self._data, user, user)
        data = self._data / "data"
        initdb = f"{binaries}/initdb -D {data} -U rollout -A trust -E UTF8 --locale=C.UTF-8 --no-sync".split()
        made = subprocess.run(
            become(initdb, user=user),
            cwd="/",
            capture_output=True,
            text=True,
        )
        assert made.returncode == 0, made.stdout + made.stderr
        with (data / "pg_hba.conf").open("a") as rules:
            rules.write("host all all 0.0.0.0/0 trust\n")
        self.by_name["postgres"] = self.postgres("postgres", data)

    def postgres_user(self) -> str | None:
        """The user of PostgreSQL, which does not run as root."""
        return "postgres" if os.getuid() == 0 else None

    def postgres_folder(self) -> Path:
        """The folder for the data of PostgreSQL and its standbys."""
        assert self._data is not None
        return self._data

    def postgres(self, name: str, data: Path) -> Server:
        """A PostgreSQL on a folder."""
        binaries, port = postgres_binaries(), self._port(name)
        settings = (
            f"listen_addresses={self.host}",
            "unix_socket_directories=",
            "fsync=off",  # tests kill processes, not the system, which keeps written data
            "max_connections=300",
            "shared_buffers=32MB",
            "wal_retrieve_retry_interval=100ms",
        )
        # The process of a connection needs a while to notice that the server was killed, and until
        # then PostgreSQL does not start again.
        command = [str(binaries / "postgres"), "-D", str(data), "-p", str(port)]
        for setting in settings:
            command += ["-c", setting]
        log = self.folder / f"{name}.log"
        return Server(
            name,
            command,
            log,
            lambda: answers_postgres(self.host, port),
            user=self.postgres_user(),
            namespace=self.namespace,
            data=data,
        )

    def _consul(self) -> None:
        http, server, serf = self._port("consul"), self._port("consul-server"), self._port("consul-serf")
        command = [str(tool("consul")), "agent", "-server", "-bootstrap-expect=1", f"-data-dir={self.folder / 'consul'}"]
        command += [f"-bind={self.host}", f"-client={self.host}", "-log-level=warn", "-node=test", f"-http-port={http}"]
        command += [f"-server-port={server}", f"-serf-lan-port={serf}", "-serf-wan-port=-1", "-dns-port=-1"]
        command += ["-grpc-port=-1", "-grpc-tls-port=-1"]
        command += ["-hcl", "performance { raft_multiplier = 1 } disable_update_check = true"]
        self._add("consul", command, lambda: len(get(f"http://{self.host}:{http}/v1/catalog/nodes")) > 3)

    def _nats(self) -> None:
        for n in range(NODES):
            for kind in ("", "-cluster", "-monitor"):
                self._port(f"nats-{n}{kind}")
        routes = ", ".join(f'"nats://{self.host}:{self.direct[f"nats-{n}-cluster"]}"' for n in range(NODES))
        for n in range(NODES):
            name = f"nats-{n}"
            folder = self.folder / name
            folder.mkdir(parents=True, exist_ok=True)
            monitor = self.direct[f"{name}-monitor"]
            data = folder / "jetstream"
            (folder / "server.conf").write_text(
                f'server_name: {name}\nlisten: "{self.host}:{self.direct[name]}"\nhttp: "{self.host}:{monitor}"\n'
                f'authorization {{ token: "{"5ec2e7" * 10}" }}\n'
                f'jetstream {{ store_dir: "{folder}", max_mem: 64MB, max_file: 100GB }}\nmax_payload: 8MB\nmax_pending: 256MB\n'
                # Clients do not get the nodes' addresses, only those of the proxies.
                f'cluster {{ name: test, listen: "{self.host}:{self.direct[f"{name}-cluster"]}", routes: [{routes}],'
                " no_advertise: true }\n"
            )
            self._add(name, [str(tool("nats-server")), "-c", str(folder / "server.conf")], healthy(self.host, monitor), data=data)

    def _s3(self) -> None:
        port, data = self._port("s3"), self.folder / "s3"
        (data / "rollout").mkdir(parents=True, exist_ok=True)  # a bucket
        self._add(
            "s3",
            # rolloutd uses plain HTTP only for a bucket on its own host, and this process may be in
            # another namespace.
            [
                str(tool("versitygw")),
                "--port",
                f"{'0.0.0.0' if self.namespace else self.host}:{port}",
                "--quiet",
                "posix",
                str(data),
            ],
            lambda: listens(self.host, port),
            environment={"ROOT_ACCESS_KEY": "chaos", "ROOT_SECRET_KEY": "chaos-secret-key"},
        )

    def _port(self, name: str) -> int:
        self.direct[name] = next(free_ports())
        return self.direct[name]


def tool(name: str) -> Path:
    """The path of a server that `make servers` built."""
    path = TOOLS / name
    assert path.exists(), f"{name} is not installed: run `make servers`"
    return path


def postgres_binaries() -> Path:
    """The folder of the newest installed PostgreSQL."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"), key=lambda path: int(path.parts[-3]))
    if found:
        return found[-1].parent
    path = shutil.which("postgres")
    assert path, "PostgreSQL is not installed (apt-get install postgresql; `make check-servers` does so as root)"
    return Path(path).resolve().parent


def free_ports() -> Iterator[int]:
    """Unused ports below the range of ephemeral ports, so that a released port stays free.

    This process reserves each port until it exits, by a lock on a file with the port's number. That
    is the protocol of libs/freeport, so no other test gets the same port.
    """
    folder = Path(os.environ.get("TMPDIR") or "/tmp", f"rollout-ports-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    while True:
        port = random.randrange(FIRST_PORT, FIRST_PORT + PORTS)
        lock = os.open(folder / str(port), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(("", port))
        except OSError:  # reserved or in use
            os.close(lock)
            continue
        yield port  # keep the lock open


def children(pid: int) -> list[int]:
    """All descendants of a process."""
    with contextlib.suppress(OSError):
        direct = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        return [found for child in direct for found in (child, *children(child))]
    return []


def listens(host: str, port: int) -> bool:
    with socket.create_connection((host, port), timeout=1):
        return True


def answers_postgres(host: str, port: int) -> bool:
    """Whether the server accepts connections. A server that still recovers answers a start-up
    message with an error."""
    with socket.create_connection((host, port), timeout=2) as connection:
        body = (196608).to_bytes(4, "big") + b"user\0rollout\0database\0postgres\0\0"
        connection.sendall((len(body) + 4).to_bytes(4, "big") + body)
        return connection.recv(1) == b"R"


def get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=2) as response:
        return response.read()


def healthy(host: str, monitor: int) -> Callable[[], bool]:
    """Whether a node of the cluster serves and knows JetStream's leader."""
    return lambda: json.loads(get(f"http://{host}:{monitor}/healthz"))["status"] == "ok"
