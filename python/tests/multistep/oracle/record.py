"""Ask RLinf 0.2: ``python -m oracle.record [--check]``, in the environment that
``make check-oracles`` builds.

Writes what it answers to ``golden.json``, from which ``make test`` compares without it; with
``--check`` reports where it answers something else than is written there. Its methods are called
unmodified, on a worker without a cluster.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from omegaconf import OmegaConf
from rlinf.workers.rollout.hf.huggingface_worker import MultiStepRolloutWorker  # type: ignore[import-not-found]

from .cases import CASES, Draw, World, actor_weights, chunk_actions, described, env_batches, module, stepped, world

GOLDEN = Path(__file__).parent / "golden.json"
METHODS = ("__init__", "recv_env_output", "get_dones_and_rewards", "send_chunk_actions", "sync_model_from_actor")


class Arrived:
    """What RLinf's channels and collectives return for an asynchronous call."""

    def __init__(self, item: Any) -> None:
        self.item = item

    async def async_wait(self) -> Any:
        return self.item


class Channel:
    """A channel that holds one item by key, and lists what is put into it."""

    def __init__(self, items: dict[str, Any] | None = None) -> None:
        self.items, self.sent = items or {}, []

    def get(self, *, key: str, async_op: bool) -> Arrived:
        return Arrived(self.items.pop(key))

    def put(self, item: Any, *, key: str, async_op: bool) -> None:
        self.sent.append([key, described(item)])


def worker(where: World, **cfg: Any) -> Any:
    """RLinf's worker with the parts that the compared methods use."""
    made = object.__new__(MultiStepRolloutWorker)
    sizes = {"env": where.env_ranks, "rollout": where.rollout_ranks}
    made._rank = where.rank
    made.placement = SimpleNamespace(get_world_size=sizes.__getitem__)
    made.cfg = OmegaConf.create({"actor": {"model": {"model_type": "mlp_policy"}}, **cfg})
    made.src_ranks = dict.fromkeys(("train", "eval"), made._setup_src_ranks(where.rows))
    made.dst_ranks = dict.fromkeys(("train", "eval"), made._setup_dst_ranks(where.rows))
    made._train_sampling_params, made._timer_metrics = {}, {}
    return made


def received(draw: Draw) -> Any:
    where = world(draw)
    made = worker(where)
    ranks, sizes = zip(*made.src_ranks[where.mode], strict=True)
    batches = env_batches(draw, list(sizes))
    items = {f"{rank}_{where.rank}_{where.mode}": batch for rank, batch in zip(ranks, batches, strict=True)}
    return asyncio.run(made.recv_env_output(Channel(items), where.mode))


def dones_and_rewards(draw: Draw) -> Any:
    case = stepped(draw)
    algorithm = {"bootstrap_type": case.bootstrap_type, "gamma": case.gamma}
    made = worker(World(1, 1, 0, 1, "train"), algorithm=algorithm, env={"train": {"auto_reset": case.auto_reset}})
    made.hf_model = case.policy
    return made.get_dones_and_rewards(case.batch)


def sent(draw: Draw) -> Any:
    where = world(draw)
    made, channel = worker(where), Channel()
    made.send_chunk_actions(channel, chunk_actions(draw, where.rows // where.rollout_ranks), where.mode)
    return channel.sent


def synced(draw: Draw) -> Any:
    made = worker(World(1, 1, 0, 1, "train"))
    made.hf_model = module(draw)
    made.actor_group_name, made.actor_weight_src_rank, made._sync_weight_comm_options = "actor", 0, None
    made.count_update, made.torch_platform = 0, torch.cpu
    torch.cpu.empty_cache = lambda: None  # type: ignore[attr-defined]
    weights = actor_weights(draw, made.hf_model)
    made.recv = lambda *_, **__: Arrived(weights)
    asyncio.run(made.sync_model_from_actor())
    return made.hf_model.state_dict()


ASKED = {
    "recv_env_output": received,
    "get_dones_and_rewards": dones_and_rewards,
    "send_chunk_actions": sent,
    "sync_model_from_actor": synced,
}


REFUSALS = {
    "recv_env_output": (AssertionError, ValueError, TypeError),
    "get_dones_and_rewards": (RuntimeError, TypeError),
    "send_chunk_actions": (AssertionError,),
    "sync_model_from_actor": (RuntimeError,),
}
"""How RLinf refuses inputs. Any other error is one of this file."""


def answer(method: str, number: int) -> Any:
    try:
        return described(ASKED[method](Draw(f"{method} {number}")))
    except REFUSALS[method] as error:
        return {"error": type(error).__name__}


def signature(method: str) -> list[list[str]]:
    """Of each parameter: its name, its kind, and its default."""
    parameters = inspect.signature(getattr(MultiStepRolloutWorker, method)).parameters.values()
    return [[it.name, it.kind.name, "" if it.default is it.empty else repr(it.default)] for it in parameters]


def main() -> None:
    torch.set_num_threads(1)
    found = {method: [answer(method, number) for number in range(CASES)] for method in ASKED}
    names = {name: signature(name) for name in METHODS}
    coroutines = [name for name in METHODS if inspect.iscoroutinefunction(getattr(MultiStepRolloutWorker, name))]
    text = json.dumps({"signatures": names, "coroutines": coroutines, "answers": found}, indent=0, sort_keys=True) + "\n"
    if "--check" not in sys.argv:
        GOLDEN.write_text(text)
        print(f"wrote {sum(map(len, found.values()))} answers to {GOLDEN.name}")
        return
    golden = json.loads(GOLDEN.read_text())
    wrong = [f"{m} {n}" for m, items in found.items() for n, item in enumerate(items) if item != golden["answers"][m][n]]
    wrong += [f"signature of {name}" for name in METHODS if names[name] != golden["signatures"][name]]
    for name in wrong:
        print(f"not as written: {name}")
    print(f"{sum(map(len, found.values()))} answers of RLinf, {len(wrong)} not as written")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
