from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from torch import Tensor

from rollout_workers.multistep import (
    ActorWeights,
    BatchInvalid,
    EnvironmentSilent,
    MemoryChannel,
    MemoryWeights,
    MultiStepRolloutWorker,
    Receipt,
    SettingsInvalid,
    WeightsMismatch,
)
from rollout_workers.weights.digest import weights_digest

from .worlds import actor_critic, config


def batch(rows: int = 2, value: float = 1.0, **changes: Any) -> dict[str, Any]:
    flags = torch.zeros(rows, 2, dtype=torch.bool)
    return {
        "obs": {"states": torch.full((rows, 4), value)},
        "final_obs": None,
        "dones": flags,
        "terminations": flags,
        "truncations": flags,
        "rewards": torch.ones(rows, 2),
        **changes,
    }


def worker(policy: Any = None, weights: Any = None, **changes: Any) -> MultiStepRolloutWorker:
    made = MultiStepRolloutWorker(config(**changes))
    made.init_worker(policy or actor_critic(), weights)
    return made


async def received(*batches: Any) -> dict[str, Any]:
    channel = MemoryChannel()
    for rank, item in enumerate(batches):
        channel.put(item, f"{rank}_0_train")
    return await worker().recv_env_output(channel)


async def test_batches_are_merged_in_order_of_ranks_whichever_arrives_first() -> None:
    channel, made = MemoryChannel(), worker()
    receiving = asyncio.create_task(made.recv_env_output(channel))
    await asyncio.sleep(0)
    channel.put(batch(value=2.0), "1_0_train")
    channel.put(batch(value=1.0), "0_0_train")
    merged = await receiving
    assert merged["obs"]["states"][:, 0].tolist() == [1.0, 1.0, 2.0, 2.0]
    assert not channel.queued()


async def test_other_keys_and_nested_observations_are_merged_too() -> None:
    nested = {"states": torch.zeros(2, 4), "camera": {"left": torch.ones(2, 3), "names": ["a", "b"]}, "goal": None}
    merged = await received(batch(obs=nested), batch(obs=nested))
    assert merged["obs"]["camera"]["left"].shape == (4, 3)
    assert merged["obs"]["camera"]["names"] == ["a", "b", "a", "b"]
    assert merged["obs"]["goal"] is None
    assert merged["obs"]["wrist_images"] is None


PROBLEMS = [
    (
        batch(rewards=None),
        "`rewards` is not a tensor in every batch: a Tensor of env rank 0, None of env rank 1; env ranks 1 must send it too",
    ),
    (
        batch(obs={"states": None, "task_descriptions": ["a", "b"]}),
        "`obs.states` is not a tensor in every batch: a Tensor of env rank 0, None of",
    ),
    (batch(rows=3), "env rank 1 sent 3 rows, not 2; check env.train.total_num_envs"),
    (batch(rewards=torch.ones(2, 3)), "`rewards` can't be concatenated: [2, 2] of env rank 0, [2, 3] of env rank 1"),
    (batch(final_obs=[]), "`final_obs` of env rank 1 is a list, not a dict"),
    (
        batch(obs={"states": torch.zeros(2, 4).numpy()}, final_obs=None),
        "`obs.states` is not a tensor in every batch: a Tensor of env rank 0, a ndarray of",
    ),
    ({"observations": 1}, "env rank 1 sent a dict, not a dict with `obs`"),
    (None, "env rank 1 sent None, not a dict with `obs`"),
    (batch(obs={}, dones=None), "the batch of env rank 1 has no tensor or list that shows its rows"),
]


@pytest.mark.parametrize(("second", "problem"), PROBLEMS, ids=[problem[:40] for _, problem in PROBLEMS])
async def test_a_batch_that_cannot_be_merged_is_refused(second: Any, problem: str) -> None:
    with pytest.raises(BatchInvalid) as caught:
        await received(batch(), second)
    assert problem in str(caught.value)


async def test_a_silent_rank_is_named_and_the_batches_of_the_others_are_kept() -> None:
    channel, made = MemoryChannel(), worker(rollout__receive_timeout_seconds=0.01)
    channel.put(batch(value=1.0), "0_0_train")
    with pytest.raises(EnvironmentSilent) as caught:
        await made.recv_env_output(channel)
    assert "env rank 1 sent nothing to rollout rank 0 for 0.01 s (key 1_0_train)" in str(caught.value)
    channel.put(batch(value=2.0), "1_0_train")
    merged = await made.recv_env_output(channel)
    assert merged["obs"]["states"][:, 0].tolist() == [1.0, 1.0, 2.0, 2.0]


async def test_train_and_eval_batches_do_not_mix() -> None:
    channel, made = MemoryChannel(), worker()
    for rank in (0, 1):
        channel.put(batch(rows=1, value=5.0), f"{rank}_0_eval")
        channel.put(batch(rows=2, value=1.0), f"{rank}_0_train")
    assert (await made.recv_env_output(channel, mode="eval"))["obs"]["states"][:, 0].tolist() == [5.0, 5.0]
    assert (await made.recv_env_output(channel))["obs"]["states"][:, 0].tolist() == [1.0] * 4
    made.send_chunk_actions(channel, torch.zeros(2, 2), mode="eval")
    assert channel.queued() == {"0_0_eval": 1, "0_1_eval": 1}


async def test_an_unknown_mode_is_refused() -> None:
    made = worker(env__eval=None)
    with pytest.raises(SettingsInvalid, match=r"the mode is .eval., and the config has train; set env.eval.total_num_envs"):
        await made.recv_env_output(MemoryChannel(), mode="eval")
    with pytest.raises(SettingsInvalid, match="the mode is 'test'"):
        made.send_chunk_actions(MemoryChannel(), torch.zeros(4, 2), mode="test")  # type: ignore[arg-type]


def ended(policy: Any, **changes: Any) -> tuple[Tensor, dict[str, Any], Tensor]:
    """Rows that continue, were truncated, and were terminated: rewards, the batch, and values."""
    truncations, terminations = torch.zeros(3, 2, dtype=torch.bool), torch.zeros(3, 2, dtype=torch.bool)
    truncations[1, -1] = terminations[2, -1] = True
    final = {"states": torch.arange(12.0).reshape(3, 4)}
    given = batch(rows=3, final_obs=final, dones=truncations | terminations, truncations=truncations, terminations=terminations)
    made = worker(policy, **changes)
    values = policy.value_head(final["states"])[:, 0].detach() if hasattr(policy, "value_head") else torch.zeros(3)
    first, second = made.get_dones_and_rewards(given)[1], made.get_dones_and_rewards(given)[1]
    assert first is not None and second is not None
    assert torch.equal(first, second)  # RLinf adds to the caller's rewards, the second time once more
    assert torch.equal(given["rewards"], torch.ones(3, 2))
    return first, given, values


@pytest.mark.parametrize(("kind", "rows"), [("standard", [1]), ("always", [1, 2])])
def test_values_are_added_to_the_rows_that_the_bootstrap_type_names(kind: str, rows: list[int]) -> None:
    rewards, _, values = ended(actor_critic(), algorithm__bootstrap_type=kind)
    wanted = torch.ones(3, 2)
    wanted[rows, 1] += 0.5 * values[rows]
    assert (values[rows] != 0).all()
    assert torch.equal(rewards, wanted)


def test_nothing_is_added_without_auto_reset_or_without_values() -> None:
    assert torch.equal(ended(actor_critic(), env__train__auto_reset=False)[0], torch.ones(3, 2))

    class Valueless:
        def predict_action_batch(self, env_obs: Any, mode: str) -> Any:
            raise AssertionError

    assert torch.equal(ended(Valueless())[0], torch.ones(3, 2))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"final_obs": None}, "`final_obs` of the batch is None"),
        ({"truncations": None}, "`truncations` of the batch is None"),
        ({"dones": None}, "`dones` of the batch is None"),
        ({"rewards": torch.ones(2, 2, dtype=torch.int64)}, "rewards are torch.int64, to which no value can be added"),
    ],
)
def test_a_batch_that_cannot_be_bootstrapped_is_refused(changes: dict[str, Any], problem: str) -> None:
    ones = torch.ones(2, 2, dtype=torch.bool)
    given = batch(dones=ones, truncations=ones, final_obs={"states": torch.zeros(2, 4)})
    with pytest.raises(BatchInvalid, match=problem):
        worker().get_dones_and_rewards({**given, **changes})


def test_actions_with_the_wrong_number_of_rows_are_refused() -> None:
    with pytest.raises(BatchInvalid, match=r"chunk actions have 3 rows, not 4 \(2 of env rank 0, 2 of env rank 1\)"):
        worker().send_chunk_actions(MemoryChannel(), torch.zeros(3, 2))
    with pytest.raises(BatchInvalid, match="chunk actions are a float, not a tensor"):
        worker().send_chunk_actions(MemoryChannel(), 1.0)  # type: ignore[arg-type]


async def test_a_sync_records_the_version_and_the_digest_of_what_the_policy_holds() -> None:
    actor, weights = actor_critic(seed=1), MemoryWeights()
    made = worker(actor_critic(seed=2), weights)
    assert (made.version, made.receipt) == (0, None)
    digest = weights_digest(actor.state_dict().items()).root
    weights.publish(ActorWeights(3, actor.state_dict(), digest))
    await made.sync_model_from_actor()
    assert (made.version, made.receipt) == (3, Receipt(3, digest))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(made.hf_model.parameters(), actor.parameters(), strict=True))
    with torch.no_grad():  # the policy has its own tensors
        actor.value_head[0].bias.add_(1)
    assert weights_digest(made.hf_model.state_dict().items()).root == digest


@pytest.mark.parametrize("damage", ["missing", "unknown", "shape", "digest"])
async def test_weights_that_do_not_fit_change_nothing(damage: str) -> None:
    source, weights = actor_critic(seed=2), MemoryWeights()
    made = worker(source, weights)
    before = weights_digest(source.state_dict().items()).root
    tensors, digest = dict(actor_critic(seed=1).state_dict()), ""
    if damage == "missing":
        del tensors["actor.0.weight"]
    elif damage == "unknown":
        tensors["critic"] = torch.zeros(1)
    elif damage == "shape":
        tensors["actor.0.bias"] = torch.zeros(1, 8)
    else:
        digest = "blake3-0"
    weights.publish(ActorWeights(9, tensors, digest))
    named = {"missing": "actor.0.weight is missing", "unknown": "critic is unknown", "shape": r"\[1, 8\], the policy's \[8\]"}
    with pytest.raises(WeightsMismatch, match=named.get(damage, "the actor's is blake3-0")):
        await made.sync_model_from_actor()
    assert (made.version, made.receipt) == (0, None)
    assert weights_digest(made.hf_model.state_dict().items()).root == before


async def test_a_worker_that_lacks_a_part_says_which() -> None:
    made = MultiStepRolloutWorker(config())
    with pytest.raises(SettingsInvalid, match="no source of weights"):
        await made.sync_model_from_actor()
    with pytest.raises(SettingsInvalid, match="the worker has no policy"):
        made.predict({})
    with pytest.raises(SettingsInvalid, match=r"rollout\.model\.model_path is missing"):
        made.init_worker()
