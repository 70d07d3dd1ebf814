"""What a worker does first, with the spec that ROLLOUT_WORKER_SPEC names: reach NATS with its credentials and register in Consul.

Prints ``reached`` and stays registered until its standard input ends.
"""

import asyncio
import sys

from rollout_workers.worker.bus import connect
from rollout_workers.worker.credential import of_server
from rollout_workers.worker.registration import Registration
from rollout_workers.worker.spec import identity, load_spec
from rollout_workers.worker.tls import of_agent


async def main() -> None:
    spec = load_spec()
    client = await connect(spec.nats_url, of_server(spec, spec.nats_token), name="reach", access=spec.nats)
    await client.jetstream().account_info()
    registration = Registration(
        identity(spec),
        agent=spec.consul_address,
        address="127.0.0.1:4711",
        consul_token=of_server(spec, spec.consul_token),
        files=of_agent(spec),
    )
    registration.start()
    print("reached", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    registration.stop()
    await client.close()


asyncio.run(main())
