"""A trained reward model as a reward: its scores equal those of training, also over gRPC, and
failures are typed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, Qwen3Config, Qwen3ForCausalLM, Qwen3ForSequenceClassification

from rollout.reward.v1 import reward_pb2
from rollout.reward.v1.reward_pb2_grpc import add_RewardWorkerServiceServicer_to_server
from rollout_workers.rewards.rewards import RewardGroup, Rewards, Scorable
from rollout_workers.rewards.worker_client import SERVICE, RewardUnavailable, RewardWorker
from rollout_workers.scoring.model import RewardModel
from rollout_workers.scoring.server import RewardServer
from rollout_workers.trainer import BadSettings
from rollout_workers.worker.credential import NO_TOKEN
from rollout_workers.worker.discovery import Services, ServiceUnavailable
from rollout_workers.worker.serving import Server
from rollout_workers.worker.spec import Identity

CONFIG = Qwen3Config(
    vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
    head_dim=16, max_position_embeddings=16, num_labels=1, pad_token_id=0,
)  # fmt: skip
END = 7
PROMPT = np.array([3, 4, 5], np.int32)
COMPLETIONS = [np.array(ids, np.int32) for ids in ([8, 9, END], [8], [], [10, 11, 12, 13, END])]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "reward"
    torch.manual_seed(0)
    Qwen3ForSequenceClassification(CONFIG).save_pretrained(path)
    return path


def load(folder: Path, alone: bool = False) -> RewardModel:
    return RewardModel(folder, dtype=torch.float32, end=END, tokens=64, alone=alone)


@torch.no_grad()
def wanted(folder: Path) -> list[float]:
    """Scores from one direct call of the model per completion, including the end token."""
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    out = []
    for ids in COMPLETIONS:
        row = [*PROMPT, *ids] if len(ids) and ids[-1] == END else [*PROMPT, *ids, END]
        out.append(float(model(input_ids=torch.tensor([row]).long()).logits[0, 0]))
    return out


@pytest.mark.parametrize("alone", [False, True])
def test_scores_equal_those_of_a_direct_call(folder: Path, alone: bool) -> None:
    scored = load(folder, alone).score([(PROMPT, COMPLETIONS[:2]), (PROMPT, COMPLETIONS[2:])])
    np.testing.assert_allclose([s.score for s in scored], wanted(folder), atol=1e-5)


def test_scores_alone_do_not_depend_on_neighbors(folder: Path) -> None:
    model = load(folder, alone=True)
    together = model.score([(PROMPT, COMPLETIONS)])
    assert together == [model.score([(PROMPT, [ids])])[0] for ids in COMPLETIONS]


def test_an_invalid_completion_does_not_fail_others(folder: Path) -> None:
    long, foreign = np.full(20, 8, np.int32), np.array([40], np.int32)
    scored = load(folder).score([(PROMPT, [long, COMPLETIONS[0], foreign])])
    assert [s.reason for s in scored] == ["CONTEXT_OVERFLOW", "", "VOCABULARY_MISMATCH"]
    np.testing.assert_allclose(scored[1].score, wanted(folder)[0], atol=1e-5)


def test_abandoned_requests_are_not_scored(folder: Path) -> None:
    asked: list[int] = []

    def given_up() -> bool:
        asked.append(len(asked))
        return len(asked) > 2

    scored = load(folder, alone=True).score([(PROMPT, COMPLETIONS)], given_up)
    assert len(asked) == 3 and [s.score != 0 for s in scored] == [True, True, False, False]


def test_a_model_without_a_trained_head_is_refused(tmp_path: Path) -> None:
    Qwen3ForCausalLM(CONFIG).save_pretrained(tmp_path)
    with pytest.raises(BadSettings, match=r"score\.weight"):
        load(tmp_path)


class Registry(Services):
    """Service discovery with one reward worker; without a worker while ``address`` is empty."""

    def __init__(self) -> None:
        super().__init__("127.0.0.1:1", NO_TOKEN, peer_token="token")
        self.address = ""

    async def _find(self, service: str, worker: tuple[str, str] | None) -> str:
        assert (service, worker) == (SERVICE, ("run-1", "reward-0"))
        if not self.address:
            raise ServiceUnavailable("not yet")
        return self.address


def group(*completions: np.ndarray) -> RewardGroup:
    return RewardGroup(b"{}", tuple(Scorable("p", "c", PROMPT.tobytes(), ids.tobytes()) for ids in completions))


async def serve(folder: Path) -> Server:
    server = Server("token")
    add_RewardWorkerServiceServicer_to_server(RewardServer(Identity("run-1", "reward-0", "reward", 1), load(folder)), server.grpc)
    await server.start([reward_pb2.DESCRIPTOR.services_by_name["RewardWorkerService"].full_name])
    return server


async def test_scores_over_grpc_and_after_a_restart(folder: Path) -> None:
    services, server = Registry(), await serve(folder)
    source = RewardWorker(services, "run-1", "reward-0", start_seconds=30)
    rewards = Rewards(source, timeout_seconds=30, retries=0)
    starting = asyncio.create_task(rewards.start())
    await asyncio.sleep(0)
    services.address = server.address
    await starting
    [first, second] = await rewards.score([group(*COMPLETIONS[:2]), group(*COMPLETIONS[2:])])
    np.testing.assert_allclose([r.reward for r in first + second], wanted(folder), atol=1e-5)
    [bad, good] = await rewards.score([group(np.full(20, 8, np.int32)), group(COMPLETIONS[0])])
    assert [(r.outcome, r.reason, r.reward) for r in bad] == [("infra_failed", "REWARD_RAISED", 0.0)]
    assert good[0].outcome == "completed"

    services.address = ""
    await server.stop(0)
    waiting = asyncio.create_task(rewards.score([group(COMPLETIONS[0])]))
    again = await serve(folder)
    services.address = again.address
    [[result]] = await waiting
    np.testing.assert_allclose(result.reward, wanted(folder)[0], atol=1e-5)
    await rewards.close()
    await services.close()
    await again.stop(0)


async def test_a_missing_worker_is_a_typed_failure() -> None:
    services = Registry()
    source = RewardWorker(services, "run-1", "reward-0", start_seconds=0.01)
    with pytest.raises(RewardUnavailable, match="reward-0 has not registered"):
        await source.start()
    rewards = Rewards(source, timeout_seconds=0.01, retries=0)
    [[result]] = await rewards.score([group(COMPLETIONS[0])])
    assert (result.outcome, result.reason, result.reward) == ("infra_failed", "REWARD_TIMEOUT", 0.0)
    await rewards.close()
