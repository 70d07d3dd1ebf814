"""A connection to a Consul agent or to the embedded registry."""

from __future__ import annotations

import http.client
import ssl


def agent(address: str, *, timeout: float, ca_file: str = "") -> http.client.HTTPConnection:
    """A connection that is made at the first request. ``address``: host:port, ``http://`` or ``https://`` before it or not."""
    scheme, found, host = address.partition("://")
    if not found:
        scheme, host = "http", address
    host = host.rstrip("/")
    if scheme == "https":
        return http.client.HTTPSConnection(host, timeout=timeout, context=ssl.create_default_context(cafile=ca_file or None))
    return http.client.HTTPConnection(host, timeout=timeout)
