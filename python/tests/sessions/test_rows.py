"""A token that several leaves share is trained once, as if each leaf had a copy of it at weight
1/k."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rollout_testing.sessiontest import ask, chat_model, said, user
from rollout_testing.templates import text_of
from rollout_workers.algorithms.grpo import GrpoConfig, grpo
from rollout_workers.algorithms.types import TokenBatch
from rollout_workers.sessions.rows import TrainingRow, training_rows
from rollout_workers.sessions.session import Session
from rollout_workers.trainer.packing import pack
from rollout_workers.trainer.types import TrainSample


@pytest.fixture(scope="module")
def session() -> Session:
    """Three answers to one question; two of them have further turns, one a fork."""
    model = chat_model(text_of("chatml"), "<|im_end|>")
    session = model.session()
    first = [user("What is 2+2?")]
    ask(session, model, first, "It is 4.")
    after = [*first, said("It is 4.")]
    ask(session, model, [*after, user("And 3+3?")], "It is 6.")
    ask(session, model, [*after, user("And 3+3?")], "6")
    ask(session, model, [*after, user("And 5+5?")], "10 it is.")
    ask(session, model, [*after, user("And 5+5?"), said("10 it is."), user("Sure?")], "Yes.")
    ask(session, model, first, "4")
    return session


def loss_of(
    rows: list[TrainingRow],
    logits: dict[tuple[int, ...], torch.Tensor],
    shift: float,
    config: GrpoConfig,
    *,
    copies: dict[str, float],
) -> torch.Tensor:
    """The loss of rows. logits: a row [vocabulary] per prefix, as a causal model has. copies: the
    advantage per leaf of rows that keep every copy of a token, at weight 1/k; else the rows'
    own."""
    logprobs, advantages, sample = [], [], []
    for at, row in enumerate(rows):
        mask = row.shares > 0 if copies else row.loss_mask > 0
        weights = row.shares * copies[row.path.segment_ids[-1]] if copies else row.advantages
        for place in np.flatnonzero(mask):
            prefix = tuple(row.token_ids[:place].tolist())
            logprobs.append(torch.log_softmax(logits[prefix], 0)[int(row.token_ids[place])])
            advantages.append(float(weights[place]))
            sample.append(at)
    taken = torch.stack(logprobs)
    distinct = sum(float(row.shares.sum()) for row in rows)
    batch = TokenBatch(
        taken,
        normalizer=distinct,
        samples=float(len(rows)),
        sample=torch.tensor(sample),
        advantages=torch.tensor(advantages),
        old_logprobs=taken.detach() - shift,
    )
    return grpo(config).loss(batch).loss


@pytest.mark.parametrize("reduction", ["token", "constant"])
@pytest.mark.parametrize("shift", [0.0, 0.1, 0.5], ids=["on policy", "within the clip", "clipped"])
def test_shared_tokens_equal_copies_at_their_share(session: Session, shift: float, reduction: str) -> None:
    leaves = session.leaves()
    assert len(leaves) == 4
    signs = (1, 1, 1, 1) if shift == 0.5 else (1, -1, -1, 1)  # clipped terms are linear in advantages of one sign
    advantages = {leaf: sign * (0.3 + at) for at, (leaf, sign) in enumerate(zip(leaves, signs, strict=True))}
    rows = training_rows(session, advantages)
    config = GrpoConfig(reduction=reduction, max_tokens=16)
    draw = torch.Generator().manual_seed(3)
    logits = {
        tuple(row.token_ids[:place].tolist()): torch.randn(512, generator=draw, dtype=torch.float64)
        for row in rows
        for place in np.flatnonzero(row.shares)
    }
    for tensor in logits.values():
        tensor.requires_grad_()
    found: list[tuple[torch.Tensor, list[torch.Tensor]]] = []
    for copies in ({}, advantages):
        loss = loss_of(rows, logits, shift, config, copies=copies)
        found.append((loss, list(torch.autograd.grad(loss, list(logits.values()), allow_unused=False))))
    (once, gradient), (copied, expected) = found
    torch.testing.assert_close(once, copied, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-7)
    assert any(term.abs().max() > 0 for term in gradient) or shift == 0.5


def test_a_packed_batch_computes_and_trains_each_token_once(session: Session) -> None:
    rows = training_rows(session, dict.fromkeys(session.leaves(), 1.0))
    samples = [
        TrainSample("group", at, row.token_ids, row.prompt_length, row.loss_mask, row.logprobs) for at, row in enumerate(rows)
    ]
    batches = pack(samples, range(len(samples)), tokens=4096)
    sampled = sum(len(segment.token_ids) for segment in session.segments if segment.sampled)
    assert sum(len(batch.target) for batch in batches) == sampled
    distinct = {tuple(row.token_ids[: end + 1].tolist()) for row in rows for end in range(len(row.token_ids))}
    assert sum(int(batch.sizes.sum()) for batch in batches) <= len(distinct)


def test_an_unnamed_leaf_counts_in_no_mean(session: Session) -> None:
    one, two, *_ = session.leaves()
    both = training_rows(session, {one: 1.0, two: 0.0})
    alone = training_rows(session, {one: 1.0})
    assert both[0].advantages[both[0].prompt_length] == 0.5
    assert alone[0].advantages[alone[0].prompt_length] == 1.0 and alone[0].loss_mask.sum() >= both[0].loss_mask.sum()


def test_an_episode_that_ended_at_an_inner_segment_is_a_leaf(session: Session) -> None:
    leaf = session.leaves()[0]
    inner = next(s.segment_id for s in session.path(leaf) if s.sampled)
    rows = training_rows(session, {inner: 1.0, leaf: 0.0})
    assert rows[0].path.segment_ids[-1] == inner and not rows[1].loss_mask[: len(rows[0].token_ids)].any()
