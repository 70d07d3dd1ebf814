"""A synchronous standby of the servers' PostgreSQL, which replaces the primary when that is lost.

After each failover another standby is made from the new primary, in the background: other faults
may hit the primary while it is copied, and then the copy is made again.
"""

from __future__ import annotations

import shutil
import subprocess
import threading
from pathlib import Path

from become import become
from proxy import Link
from servers import Server, Servers, postgres_binaries


class Failed(Exception):
    """A command of PostgreSQL failed: its server does not answer."""


class Standby:
    """The standby of ``servers.by_name["postgres"]``."""

    def __init__(self, servers: Servers, link: Link) -> None:
        """link: the proxy's connection to the primary, which is moved to the standby."""
        self.servers, self.link = servers, link
        self.server: Server | None = None
        self._copies = 0
        self._caught_up = threading.Event()
        self._wanted = threading.Semaphore(1)
        self._closing = threading.Event()
        # One thread starts all standbys: the kernel kills a server when the thread that started it
        # ends.
        self._copying = threading.Thread(target=self._keep_one, name="standby", daemon=True)
        self._copying.start()

    def ready(self) -> bool:
        """Whether the standby has every commit that the primary acknowledged."""
        return self._caught_up.is_set()

    def wait(self, seconds: float = 60.0) -> None:
        assert self._caught_up.wait(seconds), f"no standby caught up in {seconds:.0f} s"

    def fail_over(self) -> None:
        """Kill the primary, lose its data, and promote the standby."""
        assert self.ready() and self.server is not None
        old, new = self.servers.by_name["postgres"], self.server
        self._caught_up.clear()
        old.kill()
        new.name, self.servers.by_name["postgres"] = "postgres", new
        port = self.servers.direct[f"standby-{self._copies}"]
        self.servers.direct["postgres"] = port
        self._sql(port, "SELECT pg_promote()", "ALTER SYSTEM SET synchronous_standby_names = ''", "SELECT pg_reload_conf()")
        self.link.target = (self.servers.host, port)
        shutil.rmtree(old.data, ignore_errors=True)
        self._wanted.release()

    def stop(self) -> None:
        self._closing.set()
        self._wanted.release()
        if self.server is not None:
            self.server.kill()
        self._copying.join(60)

    def _keep_one(self) -> None:
        while self._wanted.acquire() and not self._closing.is_set():
            while not self._caught_up.is_set() and not self._closing.is_set():
                try:
                    self._catch_up()
                    self._caught_up.set()
                except (Failed, AssertionError):
                    self._drop()
                    self._closing.wait(0.5)

    def _drop(self) -> None:
        """Remove a standby that did not catch up."""
        if self.server is not None and self.server is not self.servers.by_name["postgres"]:
            self.server.kill()
            shutil.rmtree(self.server.data, ignore_errors=True)

    def _catch_up(self) -> None:
        """Copy the primary, follow it, and let it wait for the copy from then on."""
        primary = self.servers.direct["postgres"]
        self._copies += 1
        name = f"standby-{self._copies}"
        data = self.servers.postgres_folder() / name
        source = f"host={self.servers.host} port={primary} user=rollout application_name={name}"
        self._run("pg_basebackup", "-D", str(data), "-R", "-X", "stream", "-c", "fast", "--no-sync", "-d", source)
        self.server = self.servers.postgres(name, data)
        self.server.start()
        self._sql(primary, f"ALTER SYSTEM SET synchronous_standby_names = '\"{name}\"'", "SELECT pg_reload_conf()")
        synchronous = "SELECT count(*) FROM pg_stat_replication WHERE sync_state = 'sync' AND state = 'streaming'"
        while self._sql(primary, synchronous) != "1":
            if self._closing.wait(0.05) or self.server.left():
                raise Failed(f"{name} does not follow")

    def _sql(self, port: int, *statements: str) -> str:
        commands = [part for statement in statements for part in ("-c", statement)]
        return self._run("psql", "-XAt", "-h", self.servers.host, "-p", str(port), "-U", "rollout", "postgres", *commands)

    def _run(self, program: str, *arguments: str) -> str:
        command = become([str(postgres_binaries() / program), *arguments], user=self.servers.postgres_user())
        try:
            done = subprocess.run(command, cwd=Path("/"), capture_output=True, text=True, timeout=30)
        except subprocess.TimeoutExpired as error:
            raise Failed(f"{program} did not return") from error
        if done.returncode:
            raise Failed(done.stderr)
        return done.stdout.strip()
