"""Mutual TLS of a worker: which peers are accepted, and that renewed files are used without a
restart."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from rollout_testing.daemon import REPOSITORY
from rollout_workers.worker.discovery import connect
from rollout_workers.worker.serving import Server
from rollout_workers.worker.tls import CertificateError, PemFiles

HEALTH = health_pb2.HealthCheckRequest()


def certs(folder: Path, *arguments: str) -> None:
    """The command ``rollout certs``, compiled if necessary."""
    binary = REPOSITORY / "bin" / "rollout"
    if not binary.exists():
        subprocess.run(["go", "build", "-o", str(binary), "./rollout"], cwd=REPOSITORY / "cmd", check=True)
    subprocess.run([str(binary), "certs", *arguments, "--dir", str(folder)], check=True, capture_output=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("certs")
    for authority in (made, made / "other"):
        certs(authority, "init")
        certs(authority, "issue", "worker", "w")
        certs(authority, "issue", "service", "s")
    return made


def files(folder: Path, name: str, ca: Path | None = None) -> PemFiles:
    return PemFiles(str((ca or folder) / "ca.pem"), str(folder / f"{name}.pem"), str(folder / f"{name}-key.pem"))


async def check(address: str, tls: PemFiles | None) -> str:
    """The answer to a health check, or the code of the connection error."""
    async with connect(address, tls) as channel:
        try:
            answer = await health_pb2_grpc.HealthStub(channel).Check(HEALTH, timeout=10)
        except grpc.aio.AioRpcError as error:
            return error.code().name
        return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)


async def test_only_certificates_of_the_authority_are_accepted(folder: Path) -> None:
    other = folder / "other"
    server = Server("token", tls=files(folder, "worker-w"))
    address = await server.start([])
    try:
        assert await check(address, files(folder, "service-s")) == "SERVING"
        assert await check(address, None) == "UNAVAILABLE", "plain text"
        assert await check(address, files(other, "service-s")) == "UNAVAILABLE", "trusts another authority"
        assert await check(address, files(other, "service-s", ca=folder)) == "UNAVAILABLE", "of another authority"
    finally:
        await server.stop(0)


async def test_a_server_uses_renewed_files(folder: Path, tmp_path: Path) -> None:
    certs(folder, "issue", "worker", "renewed")
    mine = files(folder, "worker-renewed")
    server = Server("token", tls=mine)
    address = await server.start([])
    try:
        first = mine.stamp()
        assert await check(address, files(folder, "service-s")) == "SERVING"
        # A new certificate authority: peers with certificates of the old one are rejected.
        for name in ("worker-w.pem", "worker-w-key.pem"):
            target = mine.cert if name == "worker-w.pem" else mine.key
            shutil.copy(folder / "other" / name, tmp_path / name)
            os.replace(tmp_path / name, target)
        both = (folder / "ca.pem").read_text() + (folder / "other" / "ca.pem").read_text()
        trusting = PemFiles(str(tmp_path / "both.pem"), mine.cert, mine.key)
        (tmp_path / "both.pem").write_text(both)
        assert mine.stamp() != first
        assert await check(address, files(folder, "service-s")) == "UNAVAILABLE", "it shows the old certificate"
        untrusted = PemFiles(trusting.ca, str(folder / "service-s.pem"), str(folder / "service-s-key.pem"))
        assert await check(address, untrusted) == "SERVING"
    finally:
        await server.stop(0)


def test_a_certificate_without_its_key_is_rejected(folder: Path) -> None:
    with pytest.raises(CertificateError, match="service-s"):
        PemFiles(str(folder / "ca.pem"), str(folder / "worker-w.pem"), str(folder / "service-s-key.pem")).channel()
    with pytest.raises(CertificateError):
        files(folder, "worker-none").server()
