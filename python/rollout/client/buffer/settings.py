"""What the buffer must know of a run."""

from __future__ import annotations

from dataclasses import dataclass

from rollout.buffer.v1 import buffer_pb2 as pb


@dataclass(frozen=True, slots=True)
class Ledger:
    """Shape of a run's ledger; it never changes.

    group_size: samples a group. groups_per_step: groups a batch. rows: groups an epoch, so that group g of epoch e is at
    position ``e * rows + g``. in_order: step s takes exactly the positions from ``(s - 1) * groups_per_step`` on, else the
    groups that were complete first. receipts: samples name the weights that sampled them, and are refused where those are others
    than recorded. max_staleness: with receipts, most versions between a sample's weights and the step's.
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
