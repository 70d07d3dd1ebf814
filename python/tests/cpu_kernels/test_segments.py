"""The compiled segment codec agrees with the numpy codec: the same bytes, the same errors, and no
write out of bounds."""

from __future__ import annotations

import struct
from collections.abc import Callable

import numpy as np
import pytest

from rollout_workers.kernels import loading
from rollout_workers.kernels.segments import CompiledSegments, segment_codec
from rollout_workers.kernels.segments_numpy import SEGMENT, NumpySegments, Span

WIDTHS = (1, 2, 4, 8)
MARGIN = 67  # bytes before and after the elements; odd, so that they are not aligned
COUNTS = (1, 2, 7, 63, 64, 65, 320, 1_003, SEGMENT - 1, SEGMENT, SEGMENT + 1, 2 * SEGMENT + 33)

Places = Callable[[int], np.ndarray]
CHANGED: dict[str, Places] = {
    "none": lambda count: np.arange(0),
    "all": lambda count: np.arange(count),
    "every other": lambda count: np.arange(1, count, 2),
    "first": lambda count: np.arange(min(1, count)),
    "last": lambda count: np.arange(count - 1, count),
    "ends of segments": lambda count: np.unique(
        [place for place in (0, SEGMENT - 1, SEGMENT, 2 * SEGMENT - 1, 2 * SEGMENT, count - 1) if place < count]
    ),
    "distances around a mark of a byte": lambda count: _far(count, 253, 254, 255, 256, 509, 510, 511),
    "distances around a mark of two": lambda count: _far(count, 65_533, 65_534, 65_535, 65_536, 131_069, 131_070, 131_071),
    "dense, then a long gap": lambda count: np.unique((*range(count // 8), count - 1)),
    "one in a hundred": lambda count: np.flatnonzero(np.random.default_rng(count).random(count) < 0.01),
    "as many as need a byte a mark": lambda count: np.arange(0, count, 160),
    "one fewer": lambda count: np.arange(0, count, 160)[1:],
}


def _far(count: int, *distances: int) -> np.ndarray:
    places = np.cumsum(np.tile(distances, 1 + count // sum(distances)))
    return places[places < count]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", CHANGED)
def test_both_codecs_produce_the_same_bytes(compiled_segments: CompiledSegments, name: str, width: int) -> None:
    rng = np.random.default_rng(width)
    for count in COUNTS:
        old = rng.integers(0, 256, 2 * MARGIN + count * width, np.uint8)
        places = CHANGED[name](count)
        new = old.copy()
        new[:MARGIN] ^= 1
        new[MARGIN + count * width :] ^= 1  # differences outside of the piece do not count
        new[MARGIN + places * width + places % width] ^= (1 << places % 8).astype(np.uint8)
        piece = Span(MARGIN, width, count)
        made = compiled_segments.encode(old, new, piece)
        assert made == NumpySegments().encode(old, new, piece) and made[1] == len(places)

        for lead in (0, 5):  # a body may begin at any byte
            body = np.frombuffer(bytes(lead) + made[0], np.uint8)
            starts, end = compiled_segments.check(body, lead, piece)
            assert end == len(body) == NumpySegments().check(body, lead, piece)[1]
            assert starts.tolist() == NumpySegments().check(body, lead, piece)[0].tolist()
            for way in (compiled_segments, NumpySegments()):
                target = old.copy()
                way.write(target, body, starts, piece)
                assert np.array_equal(target[MARGIN:-MARGIN], new[MARGIN:-MARGIN])
                assert np.array_equal(target[:MARGIN], old[:MARGIN]) and np.array_equal(target[-MARGIN:], old[-MARGIN:])


def segment(marks: list[int], values: int, size: int, width: int) -> bytes:
    packed = np.array(marks, f"<u{size}").tobytes()
    data = bytes([7]) * (values * width)
    return b"".join(
        (struct.pack("<IIII", len(marks), values, size, 0), packed, bytes(-len(packed) % 8), data, bytes(-len(data) % 8))
    )


@pytest.mark.parametrize(
    ("marks", "values", "size", "good"),
    [
        ([9], 1, 1, True),
        ([10], 1, 1, False),  # beyond the last element
        ([5, 5], 2, 1, False),
        ([255], 1, 1, False),  # a value for a mark of the highest value
        ([3, 4], 1, 1, False),  # a mark without a value
        ([255], 0, 1, False),
        ([], 0, 1, True),
        ([65_535, 3], 1, 2, False),
        ([9], 1, 2, True),
        ([9], 1, 4, False),
        ([9], 1, 0, False),
    ],
)
@pytest.mark.parametrize("width", WIDTHS)
def test_segments_that_write_outside_are_refused(
    compiled_segments: CompiledSegments, marks: list[int], values: int, size: int, good: bool, width: int
) -> None:
    body = np.frombuffer(segment(marks, values, 1, width), np.uint8).copy() if size in (0, 4) else None
    if body is None:
        body = np.frombuffer(segment(marks, values, size, width), np.uint8)
    else:
        body[8] = size
    for way in (compiled_segments, NumpySegments()):
        assert way.check(body, 0, Span(0, width, 10))[1] == (len(body) if good else -1)
        assert way.check(body[:-1], 0, Span(0, width, 10))[1] == -1


@pytest.mark.parametrize("width", WIDTHS)
def test_both_codecs_accept_the_same_damaged_bodies_and_write_inside(compiled_segments: CompiledSegments, width: int) -> None:
    """Both codecs refuse the same damaged bodies. From the bodies that they accept, they only write
    between the margins."""
    rng = np.random.default_rng(width)
    count = SEGMENT + 300
    old = rng.integers(0, 256, count * width, np.uint8)
    new = old.copy()
    new[rng.integers(0, len(new), 50)] ^= 1
    new[SEGMENT * width :: 3 * width] ^= 1
    body, _ = NumpySegments().encode(old, new, Span(0, width, count))
    refused = 0
    for _ in range(400):
        spoiled = np.frombuffer(body, np.uint8).copy()
        for at in rng.integers(0, len(spoiled), rng.integers(1, 3)):
            spoiled[at] = rng.integers(0, 256)
        starts, end = compiled_segments.check(spoiled, 0, Span(MARGIN, width, count))
        expected = NumpySegments().check(spoiled, 0, Span(MARGIN, width, count))
        assert end == expected[1]
        if end < 0:
            refused += 1
            continue
        assert starts.tolist() == expected[0].tolist()
        guarded = [np.full(2 * MARGIN + count * width, 0xA5, np.uint8) for _ in range(2)]
        compiled_segments.write(guarded[0], spoiled, starts, Span(MARGIN, width, count))
        NumpySegments().write(guarded[1], spoiled, starts, Span(MARGIN, width, count))
        assert np.array_equal(*guarded)
        assert (guarded[0][:MARGIN] == 0xA5).all() and (guarded[0][-MARGIN:] == 0xA5).all()
    assert 0 < refused < 400


def test_a_piece_outside_of_its_file_is_refused(compiled_segments: CompiledSegments) -> None:
    data = np.zeros(64, np.uint8)
    for piece in (Span(0, 8, 9), Span(1, 8, 8)):
        with pytest.raises(ValueError, match="in 64 bytes"):
            compiled_segments.encode(data, data, piece)
        with pytest.raises(ValueError, match="in 64 bytes"):
            compiled_segments.write(data, data, np.zeros(1, np.uint64), piece)
    with pytest.raises(ValueError, match="2 places for 1 segments"):
        compiled_segments.write(data, data, np.zeros(2, np.uint64), Span(0, 8, 8))


def test_numpy_is_the_fallback(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path) -> None:
    monkeypatch.setattr(loading, "library", lambda _: tmp_path / "none.so")
    assert isinstance(segment_codec.__wrapped__(), NumpySegments)
    assert "scripts/kernel" in caplog.text
