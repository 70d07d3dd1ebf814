"""Weights arrive complete and correct over each transport and in each form; after a failure the old
weights stay in use."""

from __future__ import annotations

from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout.weights.v1 import weights_pb2 as pb
from rollout_workers.engines.errors import WeightsMismatch
from rollout_workers.weights.store import WeightsUnreadable
from rollout_workers.weights.transfer import catalog, fetch, service
from rollout_workers.weights.transfer.artifacts import PREAMBLE
from rollout_workers.weights.transfer.errors import BaseMissing, SourcesLost, VersionNotFound

from .world import Cut, World

WAYS = ["stream", "store"]
FORMS = [pb.WEIGHTS_FORM_WHOLE, pb.WEIGHTS_FORM_PATCH]


@pytest.fixture
async def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    monkeypatch.setattr(service, "CHUNK", 96)
    monkeypatch.setattr(catalog, "_SHARE", 4)  # a patch of such a small file is larger than the file
    monkeypatch.setattr(fetch, "_PAUSE_SECONDS", 0.0)
    torch.manual_seed(0)
    made = await World(tmp_path).start()
    yield made
    await made.stop()


def grow(tensors: dict[str, torch.Tensor]) -> None:
    """Change one value of one tensor."""
    tensors["0.weight"][1, 2] += 1


async def follow(world: World, way: str) -> str:
    """Bring the worker to version 1 over the network, so that patches can follow."""
    digest = world.publish(1, grow)
    assert await world.take(await world.offers(digest, store=way == "store")) == digest
    return digest


@pytest.mark.parametrize("way", WAYS)
async def test_whole_then_patches(world: World, way: str) -> None:
    held = await follow(world, way)
    for version in (2, 3, 4):
        wanted = world.publish(version, grow)
        [offer] = await world.offers(wanted, held, store=way == "store")
        assert (offer.form, offer.base_version, offer.base_digest) == (pb.WEIGHTS_FORM_PATCH, version - 1, held)
        assert bool(offer.content_id) == (way == "store")
        held = await world.take([offer])
        assert held == wanted
    assert len([path for path in world.root.rglob("v00*") if path.is_dir()]) == 2  # the versions that the worker keeps


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("harm", ["cut", "flip"])
async def test_a_transfer_that_is_damaged_at_any_byte_is_repaired(world: World, way: str, form: int, harm: str) -> None:
    """The first transfer is cut or changed at each byte in turn. The next one resumes and gives the
    right tensors."""
    world.connect_directly()
    held = await follow(world, way)
    wanted = world.publish(2, grow)
    base = held if form == pb.WEIGHTS_FORM_PATCH else ""
    offers = await world.offers(wanted, base, store=way == "store")
    assert [offer.form for offer in offers] == [form]
    size = offers[0].bytes
    for at in range(size):
        world.go_back(held, wanted)
        spoiler = Spoiler(at, harm, way)
        world.spoil = spoiler
        try:
            got = await world.take(offers)
        except Exception as error:  # only the digest or the patch's checksum detects it; the next delivery is a whole file
            assert harm == "flip" and way == "store", (at, error)
            assert world.holds == held
            got = await world.take(await world.offers(wanted, store=True, whole=True))
            await world.take(await world.offers(held))
        assert got == wanted and spoiler.fired, at


@pytest.mark.parametrize("harm", ["cut", "flip"])
async def test_a_folder_that_is_damaged_at_any_byte_is_rejected(world: World, harm: str) -> None:
    """Changes a byte of the learner's folder in shared memory. A read gives an error, or the same
    tensors."""
    before = world.holds
    wanted = world.publish(1, grow)
    file = world.folders[wanted] / "model.safetensors"
    whole = file.read_bytes()
    for at in range(len(whole)):
        file.write_bytes(whole[:at] if harm == "cut" else whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :])
        try:
            staged = world.engine.stage(world.folders[wanted], wanted)
        except (WeightsMismatch, WeightsUnreadable):
            staged = ""
        tensors = at < 8 or at >= 8 + int.from_bytes(whole[:8], "little")
        assert staged != wanted or not (tensors or harm == "cut"), at
        assert world.holds == before
    file.write_bytes(whole)
    assert world.engine.stage(world.folders[wanted], wanted) == wanted


class Spoiler:
    """Changes one byte of a transfer, once."""

    def __init__(self, at: int, harm: str, way: str) -> None:
        self.fired = False
        self._at = at + (PREAMBLE if way == "store" else 0)
        self._harm, self._seen = harm, 0

    def __call__(self, piece: Any) -> list[Any]:
        start = getattr(piece, "offset", self._seen)
        self._seen = start + len(piece.chunk)
        if self.fired or not start <= self._at < self._seen:
            return [piece]
        self.fired = True
        if self._harm == "cut":
            raise Cut
        data = bytearray(piece.chunk)
        data[self._at - start] ^= 0x10
        piece.chunk = bytes(data)
        return [piece]


@pytest.mark.parametrize("way", WAYS)
async def test_an_aborted_transfer_resumes_where_it_stopped(world: World, way: str) -> None:
    held = await follow(world, way)
    wanted = world.publish(2, grow)
    offers = await world.offers(wanted, store=way == "store")
    came = 0

    def some(piece: Any) -> list[Any]:
        nonlocal came
        if came >= 3:
            raise Cut
        came += 1
        return [piece]

    world.spoil = some
    with pytest.raises(SourcesLost, match=r"bytes, then no source sent more"):
        await world.take(offers)
    assert world.holds == held
    [begun] = list(world.root.rglob("incoming-*"))
    before = begun.stat().st_size
    assert 0 < before < offers[0].bytes

    sent: list[int] = []

    def count(piece: Any) -> list[Any]:
        sent.append(len(piece.chunk))
        return [piece]

    world.spoil = count
    assert await world.take(offers) == wanted
    assert sum(sent) == offers[0].bytes - before


async def test_a_worker_serves_its_weights(world: World) -> None:
    """The learner has exited. Another worker that has the version serves it, and the transfer
    resumes where the learner stopped."""
    held = await follow(world, "stream")
    peer = await world.serve(world.cache)
    late = World(make(world.root / "late"))
    late.catalog, late.learner = world.catalog, world.learner
    [offer] = await world.offers(held)
    offer.peers[:] = ["127.0.0.1:1", world.learner, peer]

    def half(piece: Any) -> list[Any]:
        if piece.offset >= 192 and not late.pieces:
            late.pieces = 1
            raise Cut
        return [piece]

    world.spoil = half
    assert await late.take([offer]) == held
    await late.stop()


async def test_a_late_worker_gets_a_chain_of_patches(world: World) -> None:
    base = await follow(world, "stream")
    second = world.publish(2, grow)
    assert await world.take(await world.offers(second, base)) == second  # from now on each version's patch is made at once
    digests = [second, *(world.publish(version, grow) for version in (3, 4, 5))]
    offers = await world.offers(digests[-1], second)
    assert [(offer.base_digest, offer.digest) for offer in offers] == list(pairwise(digests))
    assert await world.take(offers) == digests[-1]


async def test_a_patch_for_a_missing_base_is_an_error(world: World) -> None:
    first = world.publish(1, grow)
    second = world.publish(2, grow)
    before = world.holds
    with pytest.raises(BaseMissing):
        await world.take(await world.offers(second, first))
    assert world.holds == before
    assert await world.take(await world.offers(second)) == second


async def test_large_changes_and_old_versions_come_whole(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    first = await follow(world, "stream")

    def everything(tensors: dict[str, torch.Tensor]) -> None:
        for tensor in tensors.values():
            tensor += 1

    monkeypatch.setattr(catalog, "_SHARE", 0.5)
    second = world.publish(2, everything)
    [offer] = await world.offers(second, first)
    assert offer.form == pb.WEIGHTS_FORM_WHOLE
    assert await world.take([offer]) == second
    [offer] = await world.offers(second, "blake3-" + "0" * 64)
    assert offer.form == pb.WEIGHTS_FORM_WHOLE
    world.publish(3, grow)
    world.publish(4, grow)
    with pytest.raises(VersionNotFound):
        await world.offers(second)


async def test_wrong_tensors_for_a_digest_are_rejected(world: World) -> None:
    """A source has other tensors under the digest. The old weights stay, and the received bytes are
    not used as a base."""
    held = await follow(world, "stream")
    lie = world.publish(2, grow)
    [offer] = await world.offers(lie)
    file = world.root / "v2" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(bytes(data))
    world.catalog.published(2, lie, world.root / "v2")
    with pytest.raises(Exception, match="staged"):
        await world.take([offer])
    assert world.holds == held
    with pytest.raises(BaseMissing):
        await world.cache.bring([pb.WeightsOffer(digest="blake3-" + "1" * 64, form=pb.WEIGHTS_FORM_PATCH, base_digest=lie)])


async def test_old_objects_leave_the_store(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout_workers.weights.transfer.artifacts._KEPT", 2)
    held = await follow(world, "store")
    for version in (2, 3, 4):
        held = await world.take(await world.offers(world.publish(version, grow), held, store=True))
    assert len(world.storage.held) == 2
    await world.stored.close()
    assert world.storage.held == {}


def make(folder: Path) -> Path:
    folder.mkdir()
    return folder
