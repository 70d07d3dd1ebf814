"""The certificates of a worker and the authorities that it trusts: PEM files, which are read again
when they change."""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, cast

import grpc

from rollout.errors import RolloutError
from rollout.run.v1.run_pb2 import NatsAccess, WorkerSpec

Stamp = tuple[tuple[int, int], ...]


class CertificateError(RolloutError):
    """A certificate, key, or authority can't be read."""

    reason: ClassVar[str] = "CERT_FILE"


@dataclass(frozen=True, slots=True)
class PemFiles:
    """Paths. An empty ``ca`` means the system's authorities, an empty ``cert`` no certificate.
    ``key`` is the key of ``cert``."""

    ca: str = ""
    cert: str = ""
    key: str = ""

    def stamp(self) -> Stamp:
        """A value that changes when a file changes. Missing files (between two writes) count as
        zero."""
        stamps: list[tuple[int, int]] = []
        for path in (self.ca, self.cert, self.key):
            try:
                status = os.stat(path)
                stamps.append((status.st_mtime_ns, status.st_size))
            except OSError:
                stamps.append((0, 0))
        return tuple(stamps)

    def context(self) -> ssl.SSLContext:
        """The context for HTTP and NATS clients. Raises ``OSError`` if a file can't be read."""
        context = ssl.create_default_context(cafile=self.ca or None)
        self.reload(context)
        return context

    def reload(self, context: ssl.SSLContext) -> None:
        """Load the files into a context again. New connections use them."""
        if self.cert:
            context.load_cert_chain(self.cert, self.key)
        if self.ca:
            context.load_verify_locations(self.ca)

    def channel(self) -> grpc.ChannelCredentials:
        """The credentials of a channel. All connections of the channel use the files as they are
        now. Raises :class:`CertificateError`."""
        ca, cert, key = self._read()
        return grpc.ssl_channel_credentials(ca, key, cert)

    def server(self) -> grpc.ServerCredentials:
        """The credentials of a server that requires client certificates. Each handshake reads the
        files if they changed, and keeps the previous ones if they can't be read. Raises
        :class:`CertificateError`."""
        last = self.stamp()

        def renewed() -> grpc.ServerCertificateConfiguration | None:
            nonlocal last
            stamp = self.stamp()
            if stamp == last:
                return None
            try:
                configuration = self._configuration()
            except CertificateError:
                return None  # the files are being replaced; the next handshake tries again
            last = stamp
            return configuration

        return grpc.dynamic_ssl_server_credentials(self._configuration(), cast(Any, renewed), require_client_authentication=True)

    def _configuration(self) -> grpc.ServerCertificateConfiguration:
        ca, cert, key = self._read()
        return grpc.ssl_server_certificate_configuration([(key, cert)], root_certificates=ca)

    def _read(self) -> tuple[bytes, bytes, bytes]:
        try:
            # check that certificate and key belong together
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_cert_chain(self.cert, self.key)
            return Path(self.ca).read_bytes(), Path(self.cert).read_bytes(), Path(self.key).read_bytes()
        except (OSError, ssl.SSLError) as error:
            text = f"{self.cert} with {self.key} and {self.ca}: {error}"
            raise CertificateError(text, fix="see `rollout certs show`") from error


NO_FILES = PemFiles()
"""The system's authorities, and no certificate."""


def of_mesh(spec: WorkerSpec) -> PemFiles | None:
    """The files for services and workers; None: plain text."""
    return PemFiles(spec.tls.ca_file, spec.tls.cert_file, spec.tls.key_file) if spec.HasField("tls") else None


def of_agent(spec: WorkerSpec) -> PemFiles:
    """The files for a Consul agent or registry with https."""
    return PemFiles(spec.consul_ca_file, spec.consul_cert_file, spec.consul_key_file)


def of_nats(access: NatsAccess) -> PemFiles:
    """The files for a NATS server with TLS."""
    return PemFiles(access.ca_file, access.cert_file, access.key_file)
