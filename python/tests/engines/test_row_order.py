"""The order of the slots: segments cover the rows, moves sort them."""

import itertools

import numpy as np

from rollout_workers.engines.transformers.row_order import is_scattered, length_class, loose_segments, moves, segments


def test_a_length_class_depends_only_on_the_position_and_includes_it() -> None:
    positions = np.arange(100)
    classes = length_class(positions, 80)
    assert (classes >= np.minimum(positions + 1, 80)).all()
    assert sorted(set(classes.tolist())) == [16, 32, 64, 80]
    assert [length_class(positions[i : i + 1], 80)[0] for i in range(100)] == classes.tolist()


def test_free_rows_join_the_segment_before_them() -> None:
    positions = np.array([0, 40, 0, 33, 5, 0, 0, 70])
    active = np.array([False, True, False, True, True, False, True, True])
    assert [tuple(s) for s in segments(positions, active, 64)] == [(0, 4, 64), (4, 7, 16), (7, 8, 64)]


def test_moves_sort_by_class_and_fill_holes_with_the_fewest_copies() -> None:
    random = np.random.default_rng(0)
    for _ in range(300):
        rows = random.integers(1, 40)
        active = random.random(rows) < random.random()
        active[random.integers(rows)] = True
        positions = np.where(active, random.integers(0, 200, rows), 0)
        source, target = moves(positions, active, 200)
        assert len(set(source)) == len(source) == len(target) == len(set(target))
        assert not np.isin(target[~np.isin(target, source)], np.flatnonzero(active)).any()
        assert active[source].all()
        wanted = np.sort(length_class(positions[active], 200))[::-1]
        before = np.where(active, length_class(positions, 200), -1)[: len(wanted)]
        assert len(source) == (before != wanted).sum()
        moved, held = positions.copy(), active.copy()
        held[source] = False
        held[target], moved[target] = True, positions[source]
        assert held[: len(wanted)].all() and not held[len(wanted) :].any()
        assert length_class(moved[held], 200).tolist() == wanted.tolist()
        assert not is_scattered(segments(np.where(held, moved, 0), held, 200))


def test_loose_segments_cover_every_row_up_to_its_position() -> None:
    random = np.random.default_rng(0)
    for _ in range(100):
        positions = random.integers(0, 200, random.integers(1, 150))
        found = loose_segments(positions, 256)
        assert found[0].start == 0 and found[-1].stop == len(positions)
        assert all(a.stop == b.start for a, b in itertools.pairwise(found))
        for start, stop, length in found:
            assert length == positions[start:stop].max() + 1
