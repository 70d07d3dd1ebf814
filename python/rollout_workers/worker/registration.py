"""Keeps a worker in the registry, from a separate thread.

The registry has Consul's agent API. The thread renews the TTL check each second over one HTTP
connection. It registers the worker again if the agent does not know it, for example after a restart
of the agent. It does not use the worker's event loop.
"""

from __future__ import annotations

import http.client
import json
import logging
import os
import threading
from collections.abc import Callable
from urllib.parse import quote

from rollout import names
from rollout.run.v1.run_pb2 import WorkerSpec
from rollout_workers.worker.credential import NO_TOKEN, Token, of_server
from rollout_workers.worker.discovery import agent_connection
from rollout_workers.worker.lifecycle import Lifecycle
from rollout_workers.worker.spec import Identity
from rollout_workers.worker.tls import NO_FILES, PemFiles, of_agent

log = logging.getLogger(__name__)

TTL_SECONDS = 3
RENEW_SECONDS = 1.0
_LOOK_EVERY = 5  # renewals between two searches for a newer incarnation
DEREGISTER_AFTER = "30s"
_HTTP_TIMEOUT = 2.0


class Registration:
    """A worker's entry in the registry. ``start`` returns after the first attempt to register."""

    def __init__(
        self,
        identity: Identity,
        *,
        agent: str,
        address: str,
        consul_token: Token = NO_TOKEN,
        files: PemFiles = NO_FILES,
        superseded: Callable[[int], None] | None = None,
    ) -> None:
        """agent: host:port of the agent, or its URL. files: the TLS files for an agent at https.

        address: host:port of the worker's gRPC server.

        superseded: called once, in this thread, when workers of a newer incarnation of the run have
        registered; its argument is that incarnation.
        """
        self._identity = identity
        self._agent, self._files = agent, files
        self._host, _, port = address.rpartition(":")
        self._port = int(port)
        self._token = consul_token
        self._superseded = superseded
        self._connection: http.client.HTTPConnection | None = None
        self._stop = threading.Event()
        self._settled = threading.Event()
        self._reachable = True
        self._registered = False
        self._thread = threading.Thread(target=self._keep, name="registration", daemon=True)

    @classmethod
    def of(cls, spec: WorkerSpec, who: Identity, address: str, lifecycle: Lifecycle) -> Registration:
        """The entry of the worker that a spec describes. ``lifecycle`` stops the worker if a newer
        incarnation of the run has registered."""
        return cls(
            who,
            agent=spec.consul_address,
            address=address,
            consul_token=of_server(spec, spec.consul_token),
            files=of_agent(spec),
            superseded=lifecycle.superseded,
        )

    @property
    def check_id(self) -> str:
        return f"service:{self._identity.registration}"

    def start(self) -> None:
        """Register and start to renew the entry. Blocks for one request."""
        self._thread.start()
        self._settled.wait(2 * _HTTP_TIMEOUT)

    def stop(self) -> None:
        """Deregister and end the thread. Blocks for one request; idempotent."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(2 * _HTTP_TIMEOUT)

    def _keep(self) -> None:
        self._attempt(self._register)
        self._settled.set()
        beats = 0
        while not self._stop.wait(RENEW_SECONDS):
            self._attempt(self._renew)
            beats += 1
            if self._superseded is not None and not beats % _LOOK_EVERY:
                self._attempt(self._look_for_successors)
        self._attempt(self._deregister)
        self._close()

    def _attempt(self, action: Callable[[], None]) -> None:
        """Run the action. Logs once if the registry is unreachable; a later renewal tries again."""
        try:
            action()
        except (OSError, http.client.HTTPException) as error:
            self._close()
            if self._reachable:
                log.warning("can't reach the registry at %s (%s); retrying each second", self._agent, error)
            self._reachable = False
        else:
            if not self._reachable:
                log.info("the registry at %s is reachable again", self._agent)
            self._reachable = True

    def _register(self) -> None:
        who = self._identity
        body = {
            "ID": who.registration,
            "Name": who.service,
            "Address": self._host,
            "Port": self._port,
            "Meta": {
                "run": who.run,
                "worker": who.worker,
                "incarnation": str(who.incarnation),
                "process": who.process,
                "rank": str(who.rank),
                "proof": who.proof(f"{self._host}:{self._port}"),
                "pid": str(os.getpid()),
                **({"reserved": "true"} if who.reserved else {}),
            },
            "Check": {
                "CheckID": self.check_id,
                "TTL": f"{TTL_SECONDS}s",
                "Status": "passing",
                "DeregisterCriticalServiceAfter": DEREGISTER_AFTER,
            },
        }
        status, answer = self._put("/v1/agent/service/register?replace-existing-checks=true", body)
        self._registered = status == 200
        if not self._registered:
            log.error("the registry refused the worker: HTTP %d %s", status, answer)

    def _renew(self) -> None:
        if not self._registered:
            self._register()
            return
        status, answer = self._put(f"/v1/agent/check/pass/{quote(self.check_id, safe='')}")
        if status == 404 or (status >= 500 and "heck" in answer):  # Consul says: Unknown check ID, CheckID does not have ..
            log.warning("the registry does not know this worker any more; registering again")
            self._register()

    def _look_for_successors(self) -> None:
        """Search for learners of a newer incarnation of the run. Each incarnation has one learner,
        so this request stays small, unlike one for all inference workers."""
        status, answer = self._send("GET", f"/v1/health/service/{names.worker_service('learner')}?passing=true")
        if status != 200 or self._superseded is None:
            return
        metas: list[dict[str, str]] = [entry["Service"].get("Meta") or {} for entry in json.loads(answer) or []]
        newest = max((int(m.get("incarnation", 0)) for m in metas if m.get("run") == self._identity.run), default=0)
        if newest > self._identity.incarnation:
            self._superseded(newest)
            self._superseded = None

    def _deregister(self) -> None:
        self._put(f"/v1/agent/service/deregister/{quote(self._identity.registration, safe='')}")

    def _put(self, path: str, body: object = None) -> tuple[int, str]:
        return self._send("PUT", path, body)

    def _send(self, method: str, path: str, body: object = None) -> tuple[int, str]:
        if self._connection is None:
            self._connection = agent_connection(self._agent, timeout=_HTTP_TIMEOUT, files=self._files)
        payload = json.dumps(body).encode() if body is not None else b""
        token = self._token()
        headers = {"Content-Type": "application/json"} | ({"X-Consul-Token": token} if token else {})
        self._connection.request(method, path, payload, headers)
        response = self._connection.getresponse()
        return response.status, response.read().decode(errors="replace")

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
