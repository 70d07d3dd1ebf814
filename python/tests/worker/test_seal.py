from __future__ import annotations

import json
import os
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from rollout import names
from rollout.buffer.v1.buffer_pb2 import GetMissingRequest
from rollout.buffer.v1.buffer_pb2_grpc import BufferServiceStub
from rollout_testing.credential import services_key, sign
from rollout_testing.daemon import Daemon
from rollout_testing.services import BufferDouble, Host, put, services_of
from rollout_workers.worker.credential import Token
from rollout_workers.worker.discovery import ServiceUnavailable
from rollout_workers.worker.seal import Seal

GOLDEN = json.loads((Path(__file__).parents[3] / "schemas" / "golden" / "registration.json").read_text())


def entry(registration: dict[str, Any]) -> dict[str, Any]:
    """A registration as Consul returns it."""
    service = {key: registration[key] for key in ("ID", "Address", "Port", "Meta")}
    return {"Service": {**service, "Service": registration["Name"]}, "Node": {"Address": "10.0.0.1"}}


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: case["case"])
def test_python_accepts_what_go_accepts(case: dict[str, Any]) -> None:
    entries = [entry(case)]
    assert services_key(GOLDEN["token"]) == GOLDEN["public_key"]
    assert Seal(GOLDEN["public_key"]).services(case["Name"], entries) == (entries if case["authentic"] else [])
    assert Seal(services_key("another mesh")).services(case["Name"], entries) == []
    assert Seal("").services(case["Name"], entries) == []


def test_a_registration_counts_for_its_own_name_and_the_newest_leader_only() -> None:
    seal = Seal(services_key("mesh"))
    old, new = (
        entry(sign("mesh", {"Name": "buffer", "ID": f"b{n}", "Address": "127.0.0.1", "Port": n, "Meta": {"epoch": str(n)}}))
        for n in (9, 10)
    )
    assert seal.services("buffer", [old, new]) == [new]
    assert seal.services("storage", [old, new]) == []


async def test_a_forged_registration_is_never_dialed(daemon: Daemon) -> None:
    dialed: list[Any] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            while True:
                try:
                    dialed.append(listener.accept())
                except OSError:
                    return

        threading.Thread(target=accept, daemon=True).start()
        forged = {"Name": names.BUFFER_SERVICE, "Address": "127.0.0.1", "Port": listener.getsockname()[1]}
        check = {"Check": {"TTL": "1h", "Status": "passing"}}
        put(daemon, "/v1/agent/service/register", {**forged, "ID": "a-forged", **check})
        put(daemon, "/v1/agent/service/register", {**sign("another mesh", {**forged, "ID": "a-other"}), **check})
        services = services_of(daemon)
        with pytest.raises(ServiceUnavailable):
            await services.stub(names.BUFFER_SERVICE, BufferServiceStub)
        host, double = Host(daemon), BufferDouble()
        host.buffer(double)
        await host.start()
        stub: Any = await services.stub(names.BUFFER_SERVICE, BufferServiceStub)
        await stub.GetMissing(GetMissingRequest(run_id="run-1"), metadata=services.metadata())
        assert len(double.metadata) == 1 and not dialed
        await services.close()
        await host.stop()
        for service in ("a-forged", "a-other"):
            put(daemon, f"/v1/agent/service/deregister/{service}")
        listener.shutdown(socket.SHUT_RDWR)


def test_a_renewed_credential_is_read_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "learner-0.token"
    path.write_text("first\n")
    token = Token("first", str(path))
    assert token() == "first"
    (tmp_path / "next").write_text("second\n")
    os.replace(tmp_path / "next", path)
    assert token() == "second"
    path.write_text("")
    assert token() == "second", "an empty file is no credential"
    path.unlink()
    assert token() == "second", "the scheduler writes the file again"
    assert Token("fixed")() == "fixed"
