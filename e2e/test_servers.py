"""The scenarios on real servers: PostgreSQL, Consul, a cluster of three NATS nodes, and S3 (`make
check-servers`)."""

from pathlib import Path

import pytest
from mesh import Mesh, mesh
from production import Production
from scenario import six_steps
from sim import audited

from rollout.run.v1 import run_pb2


@pytest.mark.timeout(900)  # seventeen processes, two of them with torch
def test_six_steps_give_the_weights_of_one_process(config: Path, tmp_path: Path) -> None:
    with mesh(tmp_path / "embedded") as running:
        reference = six_steps(running, config)
    with Production(tmp_path / "servers", Mesh(tmp_path / "servers" / "mesh", "replicas")) as production:
        assert six_steps(production.running, config) == reference
        [run] = production.running.scheduler.ListRuns(run_pb2.ListRunsRequest()).runs
        assert audited(production.running, run.run_id)["whole"]
        stored = tmp_path / "servers" / "servers" / "s3" / "rollout" / "mesh"
        assert list(stored.glob("cas/*/*")), "no artifact is in the bucket"
        assert list(stored.glob("segments/*/*")), "no payload is in the bucket"
