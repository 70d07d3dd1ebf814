"""A patch gives exactly the bytes of the other version, or fails without changes."""

from __future__ import annotations

import struct

import crc32c
import numpy as np
import pytest

from rollout_workers.kernels.segments import CompiledSegments
from rollout_workers.kernels.segments_numpy import NumpySegments
from rollout_workers.weights.transfer import patch
from rollout_workers.weights.transfer.patch import Ends, PatchCorrupt

from .files import safetensors

ENDS = Ends(3, "blake3-a", 4, "blake3-b")
MOST = 1 << 30


@pytest.fixture(autouse=True, params=["compiled", "numpy"])
def segments(request: pytest.FixtureRequest, compiled_segments: CompiledSegments, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs each test with both codecs."""
    monkeypatch.setattr(patch, "segment_codec", lambda: compiled_segments if request.param == "compiled" else NumpySegments())


def patched(base: bytes, made: bytes, threads: int = 1) -> bytes:
    file = bytearray(base)
    patch.apply(made, file, threads=threads)
    return bytes(file)


def encoded(base: bytes, wanted: bytes, most: int = MOST, threads: int = 1) -> bytes:
    made = patch.encode(base, wanted, ENDS, most_bytes=most, threads=threads)
    assert made is not None
    return made


@pytest.mark.parametrize("share", [0.0, 1e-5, 1e-3, 0.01, 0.2, 1.0])
@pytest.mark.parametrize("sizes", [(7, 13, 5), (1, 0, 3), (70_001, 300_003, 1_003)])
def test_every_width_and_density(share: float, sizes: tuple[int, int, int]) -> None:
    rng = np.random.default_rng(7)
    old = {
        "f32": rng.integers(0, 1 << 32, sizes[0], np.uint32).view(np.float32),
        "bf16": rng.integers(0, 1 << 16, sizes[1], np.uint16),
        "u8": rng.integers(0, 256, sizes[2], np.uint8),
    }
    new = {name: array.copy() for name, array in old.items()}
    for array in new.values():
        raw = array.view(f"u{array.itemsize}")
        raw[rng.random(len(raw)) < share] += 1
    base, wanted = safetensors(old), safetensors(new)
    for threads in (1, 3):
        made = encoded(base, wanted, threads=threads)
        assert patched(base, made, threads) == wanted
    head = patch.read_head(made)
    assert (head.base_version, head.base_digest, head.version, head.digest) == (3, "blake3-a", 4, "blake3-b")
    assert head.changed == sum(int((old[n].view(f"u{a.itemsize}") != a.view(f"u{a.itemsize}")).sum()) for n, a in new.items())


def test_distances_of_every_kind() -> None:
    """Distances near the limits of one-byte and two-byte marks, and across segments without a
    change."""
    places = np.cumsum([0, 1, 254, 255, 256, 510, 511, 65_534, 65_535, 65_536, 131_071, 3 * patch.SEGMENT])
    old = np.zeros(int(places[-1]) + 3, np.uint16)
    new = old.copy()
    new[places] = 9
    base, wanted = safetensors({"w": old}), safetensors({"w": new})
    assert patched(base, encoded(base, wanted)) == wanted
    dense = new.copy()
    dense[: 1 << 16 : 3] = 8  # one byte a mark here, two elsewhere
    wanted = safetensors({"w": dense})
    assert patched(base, encoded(base, wanted)) == wanted


def test_equal_values_with_different_bytes() -> None:
    """Elements are compared by their bytes: zeros of both signs, and NaN."""
    old = np.array([0.0, np.nan, 1.0], np.float32)
    new = np.array([-0.0, np.nan, 1.0], np.float32)
    new.view(np.uint32)[1] ^= 1
    base, wanted = safetensors({"w": old}), safetensors({"w": new})
    made = encoded(base, wanted)
    assert patched(base, made) == wanted and patch.read_head(made).changed == 2


def test_one_in_a_hundred_takes_less_than_a_sixtieth() -> None:
    rng = np.random.default_rng(1)
    old = rng.integers(0, 1 << 16, 1 << 20, np.uint16)
    new = old.copy()
    new[rng.random(len(new)) < 0.01] ^= 1
    base, wanted = safetensors({"w": old}), safetensors({"w": new})
    assert len(encoded(base, wanted)) * 60 < len(base)


def test_too_much_has_changed() -> None:
    old = np.zeros(1 << 20, np.float32)
    base, wanted = safetensors({"w": old}), safetensors({"w": old + 1})
    assert patch.encode(base, wanted, ENDS, most_bytes=len(base) // 2) is None
    assert patch.encode(base, wanted, ENDS, most_bytes=len(base) // 2, threads=2) is None


def test_other_tensors_make_no_patch() -> None:
    base, other = safetensors({"w": np.zeros(4, np.float32)}), safetensors({"v": np.zeros(4, np.float32)})
    assert patch.encode(base, other, ENDS, most_bytes=MOST) is None
    with pytest.raises(ValueError, match="header describes"):
        patch.encode(base[:-1], base, ENDS, most_bytes=MOST)


def test_a_patch_cut_or_changed_at_any_byte_changes_nothing() -> None:
    old = np.arange(40, dtype=np.uint16)
    new = old.copy()
    new[[1, 17, 39]] += 5
    base, wanted = safetensors({"w": old, "v": np.ones(3, np.float32)}), safetensors({"w": new, "v": np.zeros(3, np.float32)})
    made = encoded(base, wanted)
    assert patched(base, made) == wanted
    for at in range(len(made)):
        flipped = bytearray(made)
        flipped[at] ^= 1 << at % 8
        for spoiled in (bytes(flipped), made[:at], made[:at] + made[at + 1 :]):
            file = bytearray(base)
            with pytest.raises(PatchCorrupt):
                patch.apply(spoiled, file)
            assert file == base


def test_a_patch_for_another_file_changes_nothing() -> None:
    base, wanted = safetensors({"w": np.zeros(8, np.uint16)}), safetensors({"w": np.ones(8, np.uint16)})
    made = encoded(base, wanted)
    for other in (safetensors({"v": np.zeros(8, np.uint16)}), safetensors({"w": np.zeros(4, np.float32)}), base[:-2], b""):
        file = bytearray(other)
        with pytest.raises(PatchCorrupt):
            patch.apply(made, file)
        assert file == other


def test_a_patch_with_inconsistent_content_is_refused() -> None:
    """The checksum is right but the content is not, as from an encoder with a bug."""
    base, wanted = safetensors({"w": np.zeros(8, np.uint16)}), safetensors({"w": np.ones(8, np.uint16)})
    made = encoded(base, wanted)[:-4]
    segment = made.index(struct.pack("<IIII", 8, 8, 1, 0))
    for at, value in ((segment, 9), (segment + 4, 9), (segment + 8, 3), (segment + 16, 200), (len(b"RWPATCH1"), 1)):
        spoiled = bytearray(made)
        spoiled[at] = value
        data = bytes(spoiled)
        file = bytearray(base)
        with pytest.raises(PatchCorrupt):
            patch.apply(data + struct.pack("<I", crc32c.crc32c(data)), file)
        assert file == base


def test_nothing_is_written_if_a_late_segment_is_corrupt() -> None:
    old = np.zeros(20 * patch.SEGMENT, np.uint16)
    base, wanted = safetensors({"w": old}), safetensors({"w": old + 1})
    made = bytearray(encoded(base, wanted)[:-4])
    made[made.rindex(struct.pack("<IIII", patch.SEGMENT, patch.SEGMENT, 1, 0)) + 17] = 2
    for threads in (1, 2):
        file = bytearray(base)
        with pytest.raises(PatchCorrupt, match=f"byte {len(base) - 2 * patch.SEGMENT} of the file"):
            patch.apply(bytes(made) + struct.pack("<I", crc32c.crc32c(bytes(made))), file, threads=threads)
        assert file == base
