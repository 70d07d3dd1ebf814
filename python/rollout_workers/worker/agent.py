"""A connection to a Consul agent or to the embedded registry."""

from __future__ import annotations

import http.client

from rollout_workers.worker.tls import PemFiles


def agent(address: str, *, timeout: float, files: PemFiles) -> http.client.HTTPConnection:
    """A connection that is made at the first request.

    ``address``: host:port, ``http://`` or ``https://`` before it or not. files: of one at https."""
    scheme, found, host = address.partition("://")
    if not found:
        scheme, host = "http", address
    host = host.rstrip("/")
    if scheme == "https":
        return http.client.HTTPSConnection(host, timeout=timeout, context=files.context())
    return http.client.HTTPConnection(host, timeout=timeout)
