"""Producers and consumers of the trajectory buffer, for programs that bring their own sampler or
learner. Imports no torch.

    from rollout.client.buffer import Ledger, Sample, connect

    with connect() as buffer:  # the local rolloutd; or connect("host:port", token="..")
        buffer.open("my-run", Ledger(group_size=8, groups_per_step=32, rows=10_000))

        with buffer.producer("my-run") as producer:
            put = producer.put(0, [Sample(token_ids, logprobs, loss_mask) for ...])  # group 0; 8 samples
            put.result()  # the samples are durable

        for batch in buffer.consumer("my-run", steps=100):
            train([sample for group in batch.groups for sample in group])
            batch.commit(trim=True)  # without trim if the samples may be needed again

A group is leased as a whole, once all of its samples have arrived. The buffer drops and counts
samples that it already has, so a put can be repeated.
"""

from rollout.client.buffer.buffer import Buffer, connect
from rollout.client.buffer.consumer import Consumer, Leased, NotReady
from rollout.client.buffer.producer import Producer, Put
from rollout.client.buffer.sample import PayloadCorrupt, Sample
from rollout.client.buffer.settings import Ledger

__all__ = ["Buffer", "Consumer", "Leased", "Ledger", "NotReady", "PayloadCorrupt", "Producer", "Put", "Sample", "connect"]
