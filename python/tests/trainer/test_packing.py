"""Prefix trees: every token attends to exactly its past, no token is lost, and rows stay within the
limit."""

from __future__ import annotations

import random

import numpy as np
import pytest

from rollout_workers.trainer import TrainSample
from rollout_workers.trainer.packing import ROW_LIMIT, MicroBatch, pack

from .addition import sampled_batch


def sample_of(number: int, tokens: list[int], trained: list[int]) -> TrainSample:
    """A sample with these tokens, trained on at these places."""
    mask = np.zeros(len(tokens), np.uint8)
    mask[trained] = 1
    return TrainSample("0/0", number, np.array(tokens, np.int32), 1, mask, np.arange(len(tokens), dtype=np.float32))


def random_samples(seed: int, *, longest: int = 40) -> list[TrainSample]:
    """Samples over three tokens, so that prefixes, duplicates and prefixes of each other abound."""
    draw = random.Random(seed)
    samples = []
    for number in range(60):
        tokens = [draw.randrange(3) for _ in range(draw.randrange(1, longest))]
        if samples and draw.random() < 0.6:
            other = draw.choice(samples).token_ids.tolist()
            tokens = other[: draw.randrange(len(other) + 1)] + tokens[: draw.randrange(len(tokens) + 1)]
        trained = [place for place in range(len(tokens)) if draw.random() < 0.4]
        samples.append(sample_of(number, tokens or [0], trained))
    return samples


def seen_from(batch: MicroBatch, row: int, place: int) -> list[int]:
    """The tokens that a position attends to, in row order, by the definition of ``subtree_end``."""
    if batch.subtree_end is None:
        return batch.token_ids[row, : place + 1].tolist()
    return [int(batch.token_ids[row, j]) for j in range(place + 1) if place < batch.subtree_end[row, j]]


@pytest.mark.parametrize("share_prefixes", [True, False])
@pytest.mark.parametrize("tokens", [16, 64, 300, 10_000])
@pytest.mark.parametrize("seed", range(4))
def test_every_trained_token_is_predicted_from_exactly_its_own_past(seed: int, tokens: int, share_prefixes: bool) -> None:
    samples = random_samples(seed)
    found = set()
    for batch in pack(samples, range(len(samples)), tokens=tokens, share_prefixes=share_prefixes):
        width = batch.token_ids.shape[1]
        for n in range(len(batch.target)):
            row, place = divmod(int(batch.predictors[batch.predictor[n]]), width)
            sample, at = samples[batch.sample[n]], int(batch.place[n])
            past = sample.token_ids[:at].tolist()
            assert seen_from(batch, row, place) == past
            assert batch.positions[row, place] == at - 1
            assert batch.target[n] == sample.token_ids[at]
            assert batch.engine_logprobs[n] == sample.logprobs[at]
            found.add((int(batch.sample[n]), at))
    wanted = {(i, int(at)) for i, s in enumerate(samples) for at in s.loss_mask.nonzero()[0] if at}
    assert found == wanted


@pytest.mark.parametrize("seed", range(4))
def test_each_position_appears_once_in_a_row(seed: int) -> None:
    samples = random_samples(seed)
    for batch in pack(samples, range(len(samples)), tokens=10_000):
        for row in range(len(batch.token_ids)):
            pasts = [tuple(seen_from(batch, row, place)) for place in range(batch.token_ids.shape[1])]
            real = [past for past in pasts if past != (0,)]  # padding is token 0 and attends only to itself
            assert len(set(real)) == len(real)


def test_padding_attends_only_to_itself_and_no_token_attends_to_it() -> None:
    samples = [sample_of(0, [1, 2, 3], [2]), sample_of(1, [2] * 200, [199]), sample_of(2, [1, 1, 3], [2])]
    (batch,) = pack(samples, range(3), tokens=10_000)
    short = int(np.argmin((batch.token_ids != 0).sum(1)))
    size = int((batch.token_ids[short] != 0).sum())
    assert batch.subtree_end is not None
    assert (batch.subtree_end[short, size:] == np.arange(size, batch.token_ids.shape[1]) + 1).all()
    assert (batch.subtree_end[short, :size] <= size).all()


@pytest.mark.parametrize("tokens", [16, 64, 300])
def test_the_limit_is_exceeded_only_by_a_single_longer_sequence(tokens: int) -> None:
    samples = random_samples(0)
    for batch in pack(samples, range(len(samples)), tokens=tokens):
        assert batch.computed <= tokens or (len(batch.token_ids) == 1 and batch.subtree_end is None)


def test_order_of_the_choice_does_not_matter() -> None:
    samples = random_samples(3)
    forward = pack(samples, range(60), tokens=100)
    backward = pack(samples, range(59, -1, -1), tokens=100)
    for a, b in zip(forward, backward, strict=True):
        assert all(np.array_equal(getattr(a, name), getattr(b, name)) for name in MicroBatch.__slots__)


def test_a_group_computes_its_prompt_once() -> None:
    prompt = list(range(1, 51))
    samples = [sample_of(i, [*prompt, 60 + i, 70 + i, 80 + i], [50, 51, 52]) for i in range(8)]
    (batch,) = pack(samples, range(8), tokens=10_000)
    assert batch.computed == 50 + 8 * 2


def test_a_sequence_beyond_the_limit_is_never_masked() -> None:
    long = [sample_of(i, [i + 1] * (ROW_LIMIT + 10 + i), [ROW_LIMIT + 9]) for i in range(2)]
    tree = [sample_of(2 + i, [5, 6, 7, i, 9], [4]) for i in range(3)]
    batches = pack([*long, *tree], range(5), tokens=1 << 20)
    assert [batch.subtree_end is None for batch in batches] == [False, True]
    assert [len(batch.token_ids) for batch in batches] == [1, 2]


def test_equal_answers_are_one_branch_unless_prefixes_are_not_shared() -> None:
    samples = [sample_of(number, [5, 6, 7, 8], [number + 2]) for number in (0, 1, 0, 1)]
    (batch,) = pack(samples, [3, 1, 0, 2], tokens=100)
    assert batch.token_ids.tolist() == [[5, 6, 7]]
    assert list(zip(batch.sample.tolist(), batch.place.tolist(), strict=True)) == [(0, 2), (2, 2), (1, 3), (3, 3)]
    (apart,) = pack(samples, range(4), tokens=100, share_prefixes=False)
    assert apart.sizes.tolist() == [2, 2, 3, 3]


def test_samples_without_trained_tokens_give_no_rows() -> None:
    assert pack([sample_of(0, [1, 2, 3], []), sample_of(1, [1], [0])], [0, 1], tokens=100) == []


def test_a_step_of_the_example_computes_a_third_of_its_tokens() -> None:
    samples = sampled_batch(0, groups=32, size=8)
    computed = sum(batch.computed for batch in pack(samples, range(len(samples)), tokens=16_384))
    assert computed < sum(len(sample.token_ids) for sample in samples) / 3
