"""Simulated hosts: network namespaces on one bridge, connected by links that can be cut."""

from __future__ import annotations

import subprocess
import uuid
from types import TracebackType

_NEW_NETWORK = 0x40000000


class Hosts:
    """Namespaces with one address each. Needs root (`reason`)."""

    def __init__(self, *names: str) -> None:
        """names: of the hosts. The n-th host has the address 10.91.x.(n+1), this process has
        10.91.x.254."""
        mark = uuid.uuid4()
        self._bridge = f"rb{mark.hex[:8]}"
        self._net = f"10.91.{mark.int % 250}"
        self.address = {name: f"{self._net}.{number + 1}" for number, name in enumerate(names)}
        self.namespace = {name: f"rollout-{mark.hex[:8]}-{name}" for name in names}

    def __enter__(self) -> Hosts:
        try:
            _ip(f"link add {self._bridge} type bridge")
            _ip(f"addr add {self._net}.254/24 dev {self._bridge}")
            _ip(f"link set {self._bridge} up")
            for number, (name, namespace) in enumerate(self.namespace.items()):
                link = self._link(number)
                _ip(f"netns add {namespace}")
                _ip(f"link add {link} type veth peer name eth0 netns {namespace}")
                _ip(f"link set {link} master {self._bridge} up")
                _ip(f"-n {namespace} addr add {self.address[name]}/24 dev eth0")
                _ip(f"-n {namespace} link set eth0 up")
                _ip(f"-n {namespace} link set lo up")
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._remove()

    def cut(self, name: str) -> None:
        """Disconnect a host."""
        _ip(f"link set {self._link(list(self.namespace).index(name))} down")

    def connect(self, name: str) -> None:
        """Connect a host again."""
        _ip(f"link set {self._link(list(self.namespace).index(name))} up")

    def _link(self, number: int) -> str:
        return f"{self._bridge}-{number}"

    def _remove(self) -> None:
        for namespace in self.namespace.values():
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True)
        subprocess.run(["ip", "link", "del", self._bridge], capture_output=True)


def reason() -> str:
    """Why this machine can't create such hosts; "" if it can."""
    try:
        with Hosts("probe"):
            return ""
    except (OSError, subprocess.CalledProcessError) as error:
        detail = (error.stderr or b"").decode().strip() if isinstance(error, subprocess.CalledProcessError) else ""
        return f"network namespaces cannot be created here (root and CAP_NET_ADMIN are needed): {error} {detail}"


def _ip(arguments: str) -> None:
    subprocess.run(["ip", *arguments.split()], check=True, capture_output=True)
