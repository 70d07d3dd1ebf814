"""Every method against what RLinf 0.2 answered on 200 random inputs (``oracle/record.py``), to the
bit. Its one difference, the addition in place, is tested in ``test_worker.py``."""

from __future__ import annotations

import asyncio
import inspect
import json
from pathlib import Path
from typing import Any

import pytest

from rollout_workers.multistep import (
    ActorWeights,
    BatchInvalid,
    MemoryChannel,
    MemoryWeights,
    MultiStepRolloutWorker,
    WeightsMismatch,
)

from .oracle.cases import CASES, Draw, World, actor_weights, chunk_actions, described, env_batches, module, stepped, world

GOLDEN = json.loads((Path(__file__).parent / "oracle" / "golden.json").read_text())
REFUSALS = (BatchInvalid, WeightsMismatch)


def worker(where: World, *, auto_reset: bool = True, **algorithm: Any) -> MultiStepRolloutWorker:
    return MultiStepRolloutWorker(
        {
            "rollout": {"rank": where.rank, "world_size": where.rollout_ranks},
            "env": {
                "world_size": where.env_ranks,
                "train": {"total_num_envs": where.rows, "auto_reset": auto_reset},
                "eval": {"total_num_envs": where.rows},
            },
            "actor": {"model": {"num_action_chunks": 1}},
            "algorithm": {"gamma": 0.99, **algorithm},
        }
    )


def received(draw: Draw) -> Any:
    where = world(draw)
    made, channel = worker(where), MemoryChannel()
    peers = made.settings.peers[where.mode]
    for peer, batch in zip(peers, env_batches(draw, [peer.rows for peer in peers]), strict=True):
        channel.put(batch, f"{peer.rank}_{where.rank}_{where.mode}")
    return asyncio.run(made.recv_env_output(channel, where.mode))  # type: ignore[arg-type]


def dones_and_rewards(draw: Draw) -> Any:
    case = stepped(draw)
    made = worker(World(1, 1, 0, 1, "train"), auto_reset=case.auto_reset, bootstrap_type=case.bootstrap_type, gamma=case.gamma)
    made.init_worker(case.policy)  # type: ignore[arg-type]
    before = described(case.batch)
    try:
        return made.get_dones_and_rewards(case.batch)
    finally:
        assert described(case.batch) == before


def sent(draw: Draw) -> Any:
    where = world(draw)
    made, out = worker(where), Sent()
    try:
        made.send_chunk_actions(out, chunk_actions(draw, where.rows // where.rollout_ranks), where.mode)  # type: ignore[arg-type]
    except BatchInvalid:
        assert not out.items
        raise
    return out.items


class Sent(MemoryChannel):
    def __init__(self) -> None:
        super().__init__()
        self.items: list[Any] = []

    def put(self, item: Any, key: str) -> None:
        self.items.append([key, described(item)])


def synced(draw: Draw) -> Any:
    made, weights, policy = worker(World(1, 1, 0, 1, "train")), MemoryWeights(), module(draw)
    made.init_worker(policy, weights)  # type: ignore[arg-type]
    weights.publish(ActorWeights(7, actor_weights(draw, policy)))
    before = described(policy.state_dict())
    try:
        asyncio.run(made.sync_model_from_actor())
    except WeightsMismatch:
        assert described(policy.state_dict()) == before
        assert made.version == 0
        raise
    assert made.version == 7
    return policy.state_dict()


ASKED = {
    "recv_env_output": received,
    "get_dones_and_rewards": dones_and_rewards,
    "send_chunk_actions": sent,
    "sync_model_from_actor": synced,
}


@pytest.mark.parametrize("method", ASKED)
def test_answers_are_those_of_rlinf(method: str) -> None:
    golden = GOLDEN["answers"][method]
    assert len(golden) == CASES
    refused = 0
    for number, wanted in enumerate(golden):
        draw = Draw(f"{method} {number}")
        if isinstance(wanted, dict) and "error" in wanted:
            refused += 1
            with pytest.raises(REFUSALS):
                ASKED[method](draw)
            continue
        assert described(ASKED[method](draw)) == wanted, f"case {number}"
    assert 5 <= refused <= CASES / 2  # both kinds of answers are there


@pytest.mark.parametrize("method", GOLDEN["signatures"])
def test_signatures_are_those_of_rlinf(method: str) -> None:
    ours = getattr(MultiStepRolloutWorker, method)
    parameters = inspect.signature(ours).parameters.values()
    found = [[it.name, it.kind.name, "" if it.default is it.empty else repr(it.default)] for it in parameters]
    assert found == GOLDEN["signatures"][method]
    assert inspect.iscoroutinefunction(ours) == (method in GOLDEN["coroutines"])
