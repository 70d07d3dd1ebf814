"""The services that `make chaos` disturbs. Replicas run on real servers, with every connection
through a proxy."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import TracebackType

from mesh import Mesh
from proxy import Proxy
from servers import Servers, free_ports
from sim import stop
from standby import Standby

PACE = 0.1
"""The longest duration of a sample in seconds. A run must be long enough for faults."""


class Production:
    """The services, with servers and proxies in the shape `replicas`."""

    def __init__(self, folder: Path, running: Mesh) -> None:
        self.folder, self.running = folder, running
        self.servers = Servers(folder / "servers")
        self.proxy = Proxy()
        self.standby: Standby | None = None

    def __enter__(self) -> Production:
        try:
            if self.running.shape == "replicas":
                self._connect()
            self.running.start()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if kind is None:
                self.proxy.heal()
                self.running.stop()
        finally:
            self._stop()

    def _connect(self) -> None:
        self.servers.start()
        ports = free_ports()
        for name in self.servers.by_name:
            self.proxy.link(name, ("127.0.0.1", next(ports)), ("127.0.0.1", self.servers.direct[name]))
        self.standby = Standby(self.servers, self.proxy.links["postgres"])
        self.standby.wait()
        for number, name in enumerate(self.running.members()):
            # Peers get another address of this host with the same port, where the proxy listens.
            port, host = next(ports), f"127.0.1.{number + 1}"
            self.proxy.link(name, (host, port), ("127.0.0.1", port))
            self.running.own_arguments[name] = ("--listen", f"127.0.0.1:{port}", "--advertise-host", host)
        self.running.config = self.folder / "rolloutd.toml"
        configured = self.servers.configuration(lambda name: self.proxy.links[name].listen[1], self.folder / "shared")
        self.running.config.write_text(configured)

    def _stop(self) -> None:
        for process in self.running.processes.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGCONT)
        stop(self.running)
        if self.standby is not None:
            self.standby.stop()
        self.servers.stop()
        self.proxy.stop()
