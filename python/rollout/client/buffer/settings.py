"""Settings of a ledger."""

from __future__ import annotations

from dataclasses import dataclass

from rollout.buffer.v1 import buffer_pb2 as pb


@dataclass(frozen=True, slots=True)
class Ledger:
    """The shape of a run's ledger. It cannot be changed after the ledger was opened.

    group_size: samples per group. groups_per_step: groups per batch. rows: groups per epoch; group
    g of epoch e has position ``e * rows + g``. in_order: step s takes exactly the positions from
    ``(s - 1) * groups_per_step`` on; otherwise it takes the groups that were completed first.
    receipts: samples name the weights that sampled them, and the buffer refuses samples whose
    weights digest differs from the recorded one. max_staleness: with receipts, the largest allowed
    difference between the version of a sample's weights and that of the step.
    """

    group_size: int
    groups_per_step: int
    rows: int
    in_order: bool = False
    receipts: bool = False
    max_staleness: int = 0

    def message(self) -> pb.LedgerConfig:
        return pb.LedgerConfig(
            groups_per_step=self.groups_per_step,
            group_size=self.group_size,
            order=pb.LEASE_ORDER_POSITION if self.in_order else pb.LEASE_ORDER_COMPLETION,
            rows=self.rows,
            receipts=self.receipts,
            max_staleness=self.max_staleness,
        )
