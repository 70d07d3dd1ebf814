"""Episodes of tensors: played in environments, encoded, and trained on."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from multistep.worlds import actor_critic
from rollout.run.v1.run_pb2 import PromptGroup
from rollout.trajectory.v1 import trajectory_pb2
from rollout_workers.algorithms.ppo import PpoConfig
from rollout_workers.inference.monitor import progress_of
from rollout_workers.inference.receipt import EngineReceipts
from rollout_workers.learner.payload import PayloadCorrupt, parsed
from rollout_workers.multistep import MemoryChannel, MultiStepRolloutWorker
from rollout_workers.multistep.actor_critic import uniforms
from rollout_workers.multistep.encode import encode_played, from_message, to_message
from rollout_workers.multistep.engine import NoLanguageModel, PolicyEngine
from rollout_workers.multistep.episodes import EpisodeRank
from rollout_workers.multistep.errors import BatchInvalid
from rollout_workers.multistep.link import CommandLink, host_episodes
from rollout_workers.multistep.player import ByRow, Played, Player, _shared
from rollout_workers.multistep.ranks import Peer, channel_key
from rollout_workers.multistep.trainer import PolicyTrainer, chunks_of, loss_of
from rollout_workers.trainer import ActingConfig, BadBatch, TrainerConfig, TrainSample
from rollout_workers.trainer.optim.schedule import Schedule


class Count:
    """Counts its steps from its seed on. It terminates when the sum of the actions reaches 3, and
    is truncated after 6 steps. A step is worth its number."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if options:
            raise ValueError(f"no options {options}")
        self.steps, self.sum, self.seed = 0, 0, seed or 0
        return [float(self.seed), 0.0, 0.0, 0.0], {}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        self.steps += 1
        self.sum += int(action)
        return [float(self.seed), float(self.steps), float(self.sum), 0.0], self.steps, self.sum >= 3, self.steps >= 6, {}


def config(rows: int, ranks: int = 1) -> dict[str, Any]:
    return {
        "rollout": {"rank": 0, "world_size": 1, "receive_timeout_seconds": 20.0},
        "env": {"world_size": ranks, "train": {"total_num_envs": rows, "auto_reset": True}},
        "actor": {"model": {"num_action_chunks": 2}},
        "algorithm": {"gamma": 0.5},
    }


@asynccontextmanager
async def playing(
    rows: int,
    ranks: int = 1,
    *,
    repeatable: bool = True,
    policy: Any = None,
    make: Any = Count,
    most_steps: int = 100,
    limit_seconds: float = math.inf,
):
    policy = policy or actor_critic()
    engine = PolicyEngine(policy, version=3, slots=rows)
    worker = MultiStepRolloutWorker(config(rows, ranks))
    by_row = ByRow(policy) if repeatable else None
    worker.init_worker(by_row or policy)
    commands, answers = MemoryChannel(), MemoryChannel()
    peers = worker.settings.peers["train"]
    link = CommandLink(commands, answers, 0, peers, repeat_seconds=0.05)
    player = Player(worker, link, engine, by_row=by_row)
    hosted = [EpisodeRank(make, rows=peer.rows, chunk=2, most_steps=most_steps) for peer in peers]
    tasks = [
        asyncio.create_task(host_episodes(host, commands, answers, peer.rank, 0, limit_seconds=limit_seconds))
        for host, peer in zip(hosted, peers, strict=True)
    ]
    tasks.append(asyncio.create_task(player.run()))
    try:
        yield player, engine, tasks, (commands, answers)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await engine.shutdown()


async def play(player: Player, seeds: Sequence[int]) -> list[Played]:
    async with asyncio.timeout(30):
        return list(
            await asyncio.gather(*(player.play(Played("0/0/0", n, seed, {"seed": seed % 7})) for n, seed in enumerate(seeds)))
        )


def content(episode: Played) -> tuple[Any, ...]:
    assert episode.result is not None
    return (
        episode.result.outcome,
        episode.result.reward,
        {name: tensor.numpy().tobytes() for name, tensor in episode.tensors.items()},
    )


async def test_an_episode_has_what_was_played_and_the_bootstrapped_value_of_its_end() -> None:
    async with playing(4) as (player, engine, _, _):
        episodes = await play(player, range(12))
    assert {episode.result.outcome for episode in episodes if episode.result} == {"completed", "truncated"}
    for episode in episodes:
        tensors, result = episode.tensors, episode.result
        assert result is not None and set(episode.versions) == {3}
        steps = int(tensors["played"].sum())
        assert episode.steps == steps == result.metrics["steps"] and result.reward == steps * (steps + 1) / 2
        assert tensors["inputs.states"].shape == (len(episode.versions), 4)
        assert tensors["logprobs"].shape == tensors["played"].shape == (len(episode.versions), 2)
        assert not tensors["dones"][:-1].any() and bool(tensors["dones"][-1, -1])
        added = float(tensors["rewards"].double().sum()) - result.reward
        assert (abs(added) > 1e-7) == (result.outcome == "truncated"), (added, result)
    assert engine.played == sum(episode.steps for episode in episodes)


async def test_an_episode_does_not_depend_on_its_row_nor_on_the_other_episodes() -> None:
    async with playing(4) as (player, *_):
        together = await play(player, range(16))
    async with playing(4, ranks=2) as (player, *_):
        reordered = (await play(player, range(15, -1, -1)))[::-1]
    async with playing(4) as (player, *_):
        alone = [(await play(player, [seed]))[0] for seed in range(16)]
    assert [content(e) for e in together] == [content(e) for e in reordered] == [content(e) for e in alone]


def test_a_turn_shares_copies_of_small_tensors() -> None:
    tensors = {
        "small": torch.ones(2, 3),
        "flat": torch.arange(2),
        "half": torch.ones(2, 3, dtype=torch.bfloat16),
        "image": torch.zeros(2, 3, 64, 64, dtype=torch.uint8),
    }
    turn, own = _shared(tensors)
    assert turn.keys() == {"small", "flat"} and own.keys() == {"half", "image"}
    tensors["small"].zero_()  # the policy may use its tensor again
    assert turn["small"].tolist() == [[1.0] * 3] * 2 and turn["flat"].dtype == "int64"


def test_a_policy_whose_bits_depend_on_the_place_for_some_numbers_is_computed_row_by_row() -> None:
    sizes: list[int] = []

    class Placed:
        def predict_action_batch(self, env_obs: Any, mode: str, seeds: torch.Tensor | None = None) -> Any:
            states = env_obs["states"]
            sizes.append(len(states))
            place = torch.arange(len(states))[:, None] * (states[:, :1] > 1)
            return place, {"prev_logprobs": place.float(), "prev_values": place.float(), "forward_inputs": {}}

    policy: Any = Placed()
    by_row = ByRow(policy)
    by_row.wanted = {0: 1, 2: 5}
    actions, _ = by_row.predict_action_batch({"states": torch.zeros(3, 4)}, "train")  # zeros have equal bits at all places
    assert sizes[-2:] == [1, 1] and actions.tolist() == [[0]] * 3


async def test_a_policy_without_seeds_is_computed_row_by_row() -> None:
    class Plain(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = actor_critic()
            self.value_head = self.inner.value_head

        def predict_action_batch(self, env_obs: Any, mode: str) -> Any:
            assert len(env_obs["states"]) == 1
            return self.inner.predict_action_batch(env_obs, mode)

    async with playing(4, policy=Plain()) as (player, *_):
        together = await play(player, range(8))
    async with playing(4, policy=Plain()) as (player, *_):
        alone = [(await play(player, [seed]))[0] for seed in range(8)]
    assert [content(e) for e in together] == [content(e) for e in alone]


async def test_seeds_give_the_distribution_of_the_policy() -> None:
    drawn = uniforms(torch.arange(20_000), 2).numpy()
    assert drawn.min() > 0 and drawn.max() < 1 and abs(np.corrcoef(drawn.T)[0, 1]) < 0.03
    assert np.allclose(np.histogram(drawn, 10, (0, 1))[0] / drawn.size, 0.1, atol=0.006)
    for continuous in (False, True):
        policy = actor_critic(action_size=3, continuous=continuous)
        states = torch.randn(1, 4).expand(4000, 4)
        actions, prediction = policy.predict_action_batch({"states": states}, "train", seeds=torch.arange(4000))
        expected = policy.distribution(states[:1])
        if continuous:
            assert torch.allclose(actions.mean(0), expected.mean[0], atol=0.04)
            assert torch.allclose(actions.std(0), expected.stddev[0], atol=0.04)
        else:
            shares = torch.stack([(actions == action).double().mean(0) for action in range(3)], -1)
            assert torch.allclose(shares, expected.probs[0].double(), atol=0.03)
        assert torch.equal(prediction["prev_logprobs"], policy(states, actions)[0].detach())


async def test_a_failing_environment_fails_its_episode_alone() -> None:
    async with playing(2) as (player, *_):
        bad = player.play(Played("k", 0, 1, {"seed": 1, "options": {"wind": 2}}))
        async with asyncio.timeout(20):
            failed, good = await asyncio.gather(bad, player.play(Played("k", 1, 2, {"seed": 2})))
    assert failed.result is not None and (failed.result.outcome, failed.result.reason) == ("infra_failed", "ENVIRONMENT_FAILED")
    assert failed.result.message == "ValueError: no options {'wind': 2}" and not failed.tensors
    assert good.result is not None and good.result.outcome in ("completed", "truncated")


class Raises(Count):
    """Its first step raises."""

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        raise ValueError("no steps")


async def test_the_engine_has_no_samples_when_the_last_episode_has_failed() -> None:
    async with playing(2, make=Raises) as (player, engine, _, _):
        played = await play(player, [1])
        stats = engine.stats()
    assert played[0].result is not None and played[0].result.message == "ValueError: no steps"
    assert (stats.active, stats.queued) == (0, 0) and progress_of(engine) is None


async def test_only_the_policy_is_watched_and_not_the_steps_of_environments() -> None:
    stepping, release = threading.Event(), threading.Event()

    class Slow(Count):
        def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
            stepping.set()
            release.wait(20)
            return super().step(action)

    async with playing(1, make=Slow) as (player, engine, _, _):
        playing_it = asyncio.create_task(play(player, [1]))
        try:
            assert await asyncio.to_thread(stepping.wait, 20)
            assert engine.stats().active == 1 and engine.progress() is None
        finally:
            release.set()
        await playing_it
        before = engine.progress()
        (observed, _), _ = await engine.act(lambda: (engine.progress(), 0))
    assert before is None and observed == engine.stats().steps - 1


async def test_an_environment_that_hangs_fails_its_episode_and_the_others_begin_again() -> None:
    release = threading.Event()

    class Hangs(Count):
        """Hangs with the seed 3."""

        def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
            if self.seed == 3:
                release.wait(30)
            return super().step(action)

    async with playing(4, most_steps=5) as (player, *_):
        undisturbed = await play(player, range(7))
    async with playing(4, most_steps=5, make=Hangs, limit_seconds=0.5) as (player, *_):
        played = await play(player, range(7))
    release.set()
    result = played[3].result
    assert result is not None and (result.outcome, result.reason) == ("infra_failed", "ENVIRONMENT_TIMEOUT")
    assert result.message == "the environment did not answer within 0.5 s" and not played[3].tensors
    del played[3], undisturbed[3]
    assert [content(e) for e in played] == [content(e) for e in undisturbed]


async def test_an_environment_that_calls_exit_fails_its_episode_alone() -> None:
    class Exits(Count):
        """Calls ``sys.exit`` with the seed 1."""

        def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
            if self.seed == 1:
                raise SystemExit(3)
            return super().step(action)

    async with playing(2, make=Exits) as (player, *_):
        played = await play(player, range(3))
    assert [episode.result.outcome for episode in played if episode.result][1] == "infra_failed"
    assert played[1].result is not None and played[1].result.message == "the environment called sys.exit"
    assert all(episode.result and not episode.result.reason for episode in (played[0], played[2]))


async def test_episodes_of_a_restarted_environment_process_begin_again() -> None:
    async with playing(4, most_steps=5) as (player, *_):
        undisturbed = await play(player, range(8))
    async with playing(4, most_steps=5) as (player, engine, tasks, channels):
        games = asyncio.create_task(play(player, range(8)))
        while engine.stats().steps < 1:
            await asyncio.sleep(0)
        tasks[0].cancel()  # with the command that it plays
        await asyncio.gather(tasks[0], return_exceptions=True)
        fresh = EpisodeRank(Count, rows=4, chunk=2, most_steps=5)
        tasks[0] = asyncio.create_task(host_episodes(fresh, *channels, 0, 0))
        assert [content(e) for e in await games] == [content(e) for e in undisturbed]


def test_a_repeated_command_is_answered_again_without_playing() -> None:
    rank = EpisodeRank(Count, rows=2, chunk=2, most_steps=3)
    command = {"sender": "a", "turn": 1, "resets": {0: {"seed": 5}}, "ended": [], "actions": None}
    rank.answer(command)
    command = {"sender": "a", "turn": 2, "resets": {}, "ended": [], "actions": torch.zeros(2, 2, dtype=torch.int64)}
    first = rank.answer(command)
    assert first is not None and first is rank.answer(command) and rank.steps == 2
    assert rank.answer(command | {"turn": 1}) is None
    assert first["played"].tolist() == [[True, True], [False, False]] and first["batch"]["rewards"].tolist() == [[1, 2], [0, 0]]
    cut = rank.answer(command | {"turn": 3})  # most_steps
    assert cut is not None and cut["batch"]["truncations"].tolist() == [[False, True], [False, False]]
    assert cut["played"].tolist() == [[True, False], [False, False]]
    other = rank.answer(command | {"sender": "b", "turn": 0})
    assert other is not None and not other["played"].any()  # another process of the rollout rank has no episodes
    with pytest.raises(BatchInvalid, match=r"actions have the shape \[2, 1\]"):
        rank.answer(command | {"turn": 9, "actions": torch.zeros(2, 1)})


async def test_the_engine_pauses_swaps_and_answers_no_prompts(tmp_path: Path) -> None:
    engine = PolicyEngine(actor_critic(), version=0, slots=2)
    receipts = EngineReceipts(engine)
    before = await receipts.read_back()
    other = actor_critic(seed=1)
    tensors = dict(other.state_dict())
    digest = await engine.stage_weights(tensors)
    await engine.pause()
    acting = asyncio.create_task(engine.act(lambda: 1))
    await asyncio.sleep(0.01)
    assert not acting.done() and engine.stats().paused
    await engine.swap_weights(4)
    await engine.resume()
    assert await acting == (1, 4) and await engine.weights_digest() == digest != before.digest
    with pytest.raises(NoLanguageModel):
        engine.generate([])
    await engine.shutdown()


class Receipts(EngineReceipts):
    def __init__(self) -> None:
        super().__init__(PolicyEngine(actor_critic(), version=3, slots=1))
        self.version = 3
        self.current.version, self.current.digest = 3, "blake3-aa"


async def samples(seeds: Sequence[int] = range(6)) -> list[TrainSample]:
    return await samples_of(None, seeds)


async def samples_of(policy: Any, seeds: Sequence[int]) -> list[TrainSample]:
    async with playing(4, policy=policy) as (player, *_):
        episodes = await play(player, seeds)
    envelopes = encode_played(
        PromptGroup(run_id="r", group_size=len(episodes), row_json=b'{"seed": 1}'), episodes, Receipts(), "inference-0", 0
    )
    return [parsed(envelope.payload) for envelope in envelopes]


async def test_episodes_pass_through_payloads_unchanged() -> None:
    async with playing(4) as (player, *_):
        episodes = await play(player, range(5))
    episodes[4].tensors, episodes[4].result = {}, replace(episodes[4].result, outcome="infra_failed", reason="ENVIRONMENT_FAILED")  # type: ignore[type-var]
    group = PromptGroup(run_id="r", epoch=1, index=2, group_size=5, row=9, row_json=b'{"seed": 1}')
    envelopes = encode_played(group, episodes, Receipts(), "inference-0", 3)
    assert [envelope.header.left_out for envelope in envelopes] == [False] * 4 + [True]
    for episode, envelope in zip(episodes[:4], envelopes, strict=False):
        header, sample = envelope.header, parsed(envelope.payload)
        assert (header.min_version, header.max_version, header.receipt.digest, header.tokens) == (
            3,
            3,
            "blake3-aa",
            episode.steps,
        )
        assert [(s.version, s.start, s.end, s.digest) for s in sample.spans] == [(3, 0, len(episode.versions), "blake3-aa")]
        assert sample.tensors.keys() == episode.tensors.keys() and sample.version == 3
        for name, tensor in episode.tensors.items():
            assert torch.equal(sample.tensors[name], tensor) and sample.tensors[name].dtype == tensor.dtype
    for tensor in (torch.zeros(0, 3), torch.tensor(2.5), torch.ones(2, dtype=torch.bfloat16), torch.tensor([True, False])):
        assert torch.equal(from_message(to_message(tensor)), tensor)
    broken = trajectory_pb2.Trajectory.FromString(envelopes[0].payload)
    broken.tensors["values"].data = b"123"
    with pytest.raises(PayloadCorrupt, match="has 3 bytes, not"):
        parsed(broken.SerializeToString())


def advantages_by_hand(sample: TrainSample, level: str, config: PpoConfig) -> list[float]:
    """GAE over the chunks or the played actions of one episode."""
    tensors = sample.tensors
    rewards, values = tensors["rewards"].double(), tensors["values"].double()
    if level == "chunk_level":
        steps = [(float(rewards[t].sum()), float(values[t, 0])) for t in range(len(rewards))]
    else:
        steps = [
            (float(r), float(v))
            for r, v, p in zip(rewards.flatten(), values.flatten(), tensors["played"].flatten(), strict=True)
            if p
        ]
        steps[-1] = steps[-1][0] + float(rewards.flatten()[~tensors["played"].flatten()].sum()), steps[-1][1]
    found, running, following = [], 0.0, 0.0
    for reward, value in reversed(steps):
        running = reward + config.gamma * following - value + config.gamma * config.gae_lambda * running
        following = value
        found.append(running)
    return found[::-1]


@pytest.mark.parametrize("level", ["chunk_level", "action_level"])
async def test_advantages_are_those_of_chunks_or_of_actions(level: str) -> None:
    batch, ppo = await samples(), PpoConfig(gamma=0.9, gae_lambda=0.8, whiten_advantages=False, kl_coefficient=0.0)
    chunks = chunks_of(batch, ppo, level)
    expected = [value for sample in batch for value in advantages_by_hand(sample, level, ppo)]
    assert torch.allclose(chunks.advantages[chunks.counted].double(), torch.tensor(expected, dtype=torch.float64), atol=1e-5)
    assert torch.allclose(chunks.returns[chunks.counted], (chunks.advantages + chunks.values)[chunks.counted], atol=1e-5)
    whitened = chunks_of(batch, replace(ppo, whiten_advantages=True), level)
    assert abs(float(whitened.advantages[whitened.counted].mean())) < 1e-6


async def test_values_of_chunks_alone_have_no_advantages_of_actions() -> None:
    batch = await samples()
    for sample in batch:
        sample.tensors = {**sample.tensors, "values": sample.tensors["values"][:, :1]}
    with pytest.raises(BadBatch, match="1 values of a chunk of 2 actions"):
        chunks_of(batch, PpoConfig(), "action_level")
    batch[0].tensors = {name: tensor for name, tensor in batch[0].tensors.items() if name != "played"}
    with pytest.raises(BadBatch, match="has no tensor `played`"):
        chunks_of(batch, PpoConfig(), "chunk_level")


PPO = PpoConfig(gamma=0.9, kl_coefficient=0.0, value_clip=0.0, value_coefficient=0.5, epochs=2, minibatches=2)


def trainer(
    folder: Path, level: str = "chunk_level", ppo: PpoConfig = PPO, *, logprob_type: str = "", **changes: Any
) -> PolicyTrainer:
    acting = ActingConfig(level, logprob_type=logprob_type)
    return PolicyTrainer(
        folder,
        TrainerConfig(algorithm="ppo", settings=ppo, schedule=Schedule(peak=1e-2), threads=1, acting=acting, **changes),
    )


@pytest.mark.parametrize("level", ["chunk_level", "action_level"])
async def test_a_trainer_continues_from_its_state_bit_for_bit(tmp_path: Path, level: str) -> None:
    actor_critic().save_pretrained(tmp_path / "policy")
    batches = [await samples(range(n, n + 6)) for n in range(3)]
    whole = trainer(tmp_path / "policy", level)
    results = [whole.train_step(batch, step) for step, batch in enumerate(batches, 1)]
    first = trainer(tmp_path / "policy", level)
    first.train_step(batches[0][::-1], 1)
    first.save_state(tmp_path / "state")
    resumed = trainer(tmp_path / "policy", level)
    resumed.load_state(tmp_path / "state")
    for step in (2, 3):
        resumed.train_step(batches[step - 1], step)
    assert resumed.weights_digest() == whole.weights_digest()
    metrics = results[0].metrics
    assert metrics["tokens"] == sum(float(sample.tensors["played"].sum()) for sample in batches[0])
    assert metrics["updates"] == 4 and metrics["entropy"] > 0 and len(results[0].advantages) == 6
    written = whole.write_weights(tmp_path / "weights")
    assert written.digest == whole.weights_digest().root and (tmp_path / "weights" / "actor_critic.py").is_file()


def reference_loss(trained: PolicyTrainer, batch: Sequence[TrainSample], level: str, ppo: PpoConfig) -> torch.Tensor:
    """The clipped loss, the value loss, and the entropy bonus, action by action or chunk by
    chunk."""
    chunks = chunks_of(batch, ppo, level)
    logprobs, entropies, values = trained.policy.model(**chunks.inputs)
    losses = []
    for row, played in enumerate(chunks.played.tolist()):
        places = [place for place, was in enumerate(played) if was]
        units = [places] if level == "chunk_level" else [[place] for place in places]
        for unit in units:
            at = (row,) if level == "chunk_level" else (row, unit[0])
            advantage, old, value = (
                chunks.advantages[at],
                chunks.logprobs[at],
                values[row, unit[0] if level != "chunk_level" else 0],
            )
            ratio = (sum(logprobs[row, place] for place in unit) - old).exp()
            clipped = ratio.clamp(1 - ppo.clip_low, 1 + ppo.clip_high)
            gain = torch.minimum(ratio * advantage, clipped * advantage)
            if ppo.dual_clip and advantage < 0:
                gain = torch.maximum(gain, ppo.dual_clip * advantage)
            before, target = chunks.values[at], chunks.returns[at]
            bounded = before + (value - before).clamp(-ppo.value_clip, ppo.value_clip)
            error = torch.maximum((value - target) ** 2, (bounded - target) ** 2) / 2
            entropy = sum(entropies[row, place] for place in unit)
            losses.append(-gain + ppo.value_coefficient * error - ppo.entropy_coefficient * entropy)
    return torch.stack(losses).mean()


@pytest.mark.parametrize("level", ["chunk_level", "action_level"])
async def test_the_loss_is_that_of_ppo(tmp_path: Path, level: str) -> None:
    actor_critic().save_pretrained(tmp_path)
    batch = sorted(await samples(), key=lambda sample: sample.sample)
    ppo = PpoConfig(
        clip_low=0.01, clip_high=0.02, dual_clip=1.01, value_clip=0.05, value_coefficient=0.3, entropy_coefficient=0.1, gamma=0.9
    )
    trained = trainer(tmp_path, level, ppo=ppo)
    with torch.no_grad():
        for parameter in trained.policy.model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    chunks = chunks_of(batch, ppo, level)
    weight = float(chunks.counted.sum())
    found = loss_of(trained.policy.model, chunks, torch.arange(len(chunks.episode)), trained.algorithm, normalizer=weight)
    torch.testing.assert_close(found.loss, reference_loss(trained, batch, level, ppo))
    assert 0 < float(found.sums["clip_fraction"]) < weight


async def test_microbatches_give_the_same_gradient(tmp_path: Path) -> None:
    actor_critic().save_pretrained(tmp_path)
    batch = await samples()
    one, many = trainer(tmp_path), trainer(tmp_path, tokens_per_microbatch=2)
    one.train_step(batch, 1)
    many.train_step(batch, 1)
    for (name, a), (_, b) in zip(one.named_weights(), many.named_weights(), strict=True):
        assert torch.allclose(a, b, atol=1e-4), name


async def test_a_command_that_no_process_takes_is_repeated_without_filling_the_channel() -> None:
    """It is answered by the process that starts after a while."""
    commands, answers, peers = MemoryChannel(2), MemoryChannel(), [Peer(0, 4)]
    link = CommandLink(commands, answers, 0, peers, repeat_seconds=0.01)
    link.begin()
    link.resets = {row: {"seed": row} for row in range(4)}
    link.send_resets()
    received = asyncio.create_task(link.get(channel_key(0, 0, "train")))
    await asyncio.sleep(0.2)
    assert not received.done()
    host = asyncio.create_task(host_episodes(EpisodeRank(Count, rows=4, chunk=2, most_steps=9), commands, answers, 0, 0))
    try:
        async with asyncio.timeout(10):
            batch = await received
        assert len(batch["dones"]) == 4 and not link.failures
    finally:
        host.cancel()
        await asyncio.gather(host, return_exceptions=True)
