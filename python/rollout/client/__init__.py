"""A small client of the control plane: plan a configuration, submit it, follow the run, read its
events and metrics.

    from rollout.client import connect

    with connect() as client:  # the local rolloutd; or connect("host:port", token="..")
        run = client.submit(client.plan("examples/addition/grpo.toml", set=["train.steps=40"]))
        for status in client.follow(run.run_id):
            print(status.phase, status.run.step)

``connect_async`` is the same for asyncio. Messages are the generated ones, such as
``rollout.run.v1``. Errors of the control plane are :class:`RemoteError`; a config that cannot be
planned raises :class:`PlanRefused` with all of its problems.
"""

from rollout.client.aio import AsyncClient, connect_async
from rollout.client.connection import NoDaemon, Server, local_server, state_directory
from rollout.client.episodes import Episode
from rollout.client.errors import PlanRefused, RemoteError
from rollout.client.planned import Planned
from rollout.client.sync import Client, connect

__all__ = [
    "AsyncClient",
    "Client",
    "Episode",
    "NoDaemon",
    "PlanRefused",
    "Planned",
    "RemoteError",
    "Server",
    "connect",
    "connect_async",
    "local_server",
    "state_directory",
]
