"""Measures weights: patches compared with XOR + zstd, and the transfer to two workers of one host
compared with a plain copy of the file.

    python bench/weights.py [--megabytes 270] [--rounds 5] [--model models/SmolLM2-135M-Instruct]

Patches: bf16 values of a model of that size; a step changes the last bit of 1 % of them. Both
codecs encode and apply in one thread, without digests, and overwrite the old values. The verified
time is ours with the digest of all tensors. The codecs take turns, and the fastest round of each
counts.

Transfer: a learner's process writes tensors with the model's shapes (bf16), and the processes of
two workers load them: stage, verify the digest, swap, compute the digest again. The transports are
shared memory and streams over loopback, whole and as patches, like between hosts. The plain copy
writes the same file twice, from memory to memory.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "python")]

import numpy as np  # noqa: E402
import torch  # noqa: E402
from record import recorded  # noqa: E402

from rollout.weights.v1 import weights_pb2 as pb  # noqa: E402
from rollout.weights.v1.weights_pb2_grpc import add_WeightsServiceServicer_to_server  # noqa: E402
from rollout_workers.engines.transformers.current_weights import CurrentWeights  # noqa: E402
from rollout_workers.weights import named_weights, weights_digest, write_weights  # noqa: E402
from rollout_workers.weights.store import stage_folder  # noqa: E402
from rollout_workers.weights.tensor_file import write_tensors  # noqa: E402
from rollout_workers.weights.transfer import patch, service  # noqa: E402
from rollout_workers.weights.transfer.cache import WeightsCache  # noqa: E402
from rollout_workers.weights.transfer.catalog import Catalog  # noqa: E402
from rollout_workers.weights.transfer.fetch import Fetcher  # noqa: E402
from rollout_workers.weights.transfer.shared_memory import SHARED_MEMORY, SharedMemory  # noqa: E402
from rollout_workers.worker.credential import NO_TOKEN  # noqa: E402
from rollout_workers.worker.discovery import Services  # noqa: E402
from rollout_workers.worker.serving import Server  # noqa: E402
from rollout_workers.worker.spec import Identity  # noqa: E402

RUN, TOKEN = "run-bench-weights", "bench"
SHARE = 0.01
WANTED = {"encode": 3.0, "apply": 6.0}
WORKERS = 2


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure patches and the transfer of weights.")
    parser.add_argument("--megabytes", type=int, default=270, help="megabytes of values for patches")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--model", type=Path, default=ROOT / "models" / "SmolLM2-135M-Instruct", help="folder of the model's config"
    )
    parser.add_argument("--worker", default="", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        asyncio.run(work(given.worker, given.model))
        return
    with recorded("weights") as figures:
        short = patches(given.megabytes, given.rounds, figures)
        if (given.model / "config.json").is_file():
            asyncio.run(deliver(given.model, given.rounds, figures))
        else:
            print(f"delivery was not measured: {given.model} is not there (make demo MODEL=smollm2 makes it)")
        spent = resource.getrusage(resource.RUSAGE_SELF)
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        figures["cpu_seconds"] = spent.ru_utime + spent.ru_stime + children.ru_utime + children.ru_stime
        figures["peak_memory_bytes"] = 1024 * (spent.ru_maxrss + children.ru_maxrss)
        peak = figures["peak_memory_bytes"] / 1e6
        print(f"{figures['cpu_seconds']:.1f} CPU s in all; peak memory {peak:.0f} MB, parent and largest child")
    sys.exit(f"below its bar: {', '.join(short)}" if short else 0)


def patches(megabytes: int, rounds: int, figures: dict[str, Any]) -> list[str]:
    """Print the figures of both codecs. Returns those below the bar."""
    import pyarrow

    count = megabytes * 500_000
    rng = np.random.default_rng(0)
    old = (rng.standard_normal(count, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    new = old.copy()
    new[rng.random(count, np.float32) < SHARE] ^= 1
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY if SHARED_MEMORY.is_dir() else None) as folder:
        base, wanted = (_file(Path(folder) / name, values) for name, values in (("old", old), ("new", new)))
    target = bytearray(base)
    ends = patch.Ends(1, "blake3-old", 2, "blake3-new")
    codec = pyarrow.Codec("zstd", compression_level=1)
    made: dict[str, Any] = {}
    held = old.copy()
    times: dict[str, list[float]] = {}

    def run(name: str, function: Callable[[], Any]) -> None:
        began = time.perf_counter()
        made[name] = function()
        times.setdefault(name, []).append(time.perf_counter() - began)

    def undo() -> None:
        target[:] = base
        np.copyto(held, old)

    def xor_apply() -> None:
        difference = np.frombuffer(codec.decompress(made["xor encode"], decompressed_size=new.nbytes), np.uint16)
        np.bitwise_xor(held, difference, out=held)

    for _ in range(rounds):
        undo()
        run("encode", lambda: patch.encode(base, wanted, ends, most_bytes=len(base)))
        run("xor encode", lambda: codec.compress(np.bitwise_xor(old, new)))
        run("apply", lambda: patch.apply(made["encode"], target))
        run("xor apply", xor_apply)
        assert target == wanted and np.array_equal(held, new)
        tensor = torch.frombuffer(target, dtype=torch.bfloat16, count=count, offset=len(base) - 2 * count)
        run("digest", lambda tensor=tensor: weights_digest([("w", tensor)]))
        del tensor
    best = {name: min(taken) for name, taken in times.items()}
    print(f"patches: {len(base) / 1e6:.0f} MB of bf16, {SHARE:.0%} changed, one thread, the best of {rounds}")
    print(f"{'':10}{'ours GB/s':>12}{'XOR + zstd':>12}{'ratio':>8}{'bar':>6}{'with digest ms':>16}")
    short = []
    for name, bar in WANTED.items():
        ours, theirs = (len(base) / 1e9 / best[key] for key in (name, f"xor {name}"))
        verified = (best[name] + best["digest"]) * 1e3
        print(f"{name:10}{ours:12.2f}{theirs:12.2f}{ours / theirs:8.2f}{bar:6.1f}{verified:16.0f}")
        short += [name] if ours / theirs < bar else []
        figures[name] = {
            "gigabytes_per_second": ours,
            "xor_zstd_gigabytes_per_second": theirs,
            "ratio": ours / theirs,
            "bar": bar,
        }
        figures[name] |= {"with_digest_ms": verified, "verified_bytes": len(base)}
    size, other = len(made["encode"]) / len(base), len(made["xor encode"]) / len(base)
    print(f"size: {size:.2%} of the whole, XOR + zstd {other:.2%}\n")
    return short


def _file(path: Path, values: np.ndarray) -> bytes:
    write_tensors(path, {"w": torch.from_numpy(values).view(torch.bfloat16)})
    return path.read_bytes()


async def deliver(model: Path, rounds: int, figures: dict[str, Any]) -> None:
    """Print the times of transfers to two workers, for each transport."""
    module = _module(model)
    tensors = {name: tensor.clone() for name, tensor in named_weights(module)}
    del module
    size = sum(tensor.nbytes for tensor in tensors.values())
    memory = SharedMemory(RUN)
    folder = memory.folder or Path(tempfile.mkdtemp())
    catalog = Catalog()
    server = Server(TOKEN)
    add_WeightsServiceServicer_to_server(service.WeightsServer(Identity(RUN, "learner-0", "learner", 1), catalog), server.grpc)
    address = await server.start([service.SERVICE])
    workers = [await Worker.start(number, model) for number in range(WORKERS)]
    versions = iter(range(1, 1 << 20))
    times: dict[str, list[float]] = {"shared memory": [], "stream, whole": [], "stream, patches": [], "plain copy": []}
    try:
        for _ in range(rounds):
            base = ""
            for way in ("shared memory", "stream, whole", "stream, patches"):
                _change(tensors)
                version = next(versions)
                staging = await asyncio.to_thread(stage_folder, folder, model, size + (1 << 16))
                began = time.perf_counter()
                digest = await asyncio.to_thread(_publish, folder, tensors, model, version, staging)
                catalog.published(version, digest, folder / f"v{version}")
                offers: list[pb.WeightsOffer] = []
                if way != "shared memory":
                    offers = await catalog.offers(digest, base, whole=not base, store=False)
                    assert len(offers) == 1 and (offers[0].form == pb.WEIGHTS_FORM_PATCH) == bool(base)
                    for offer in offers:
                        offer.peers.append(address)
                got = await asyncio.gather(*(worker.take(digest, folder / f"v{version}", offers) for worker in workers))
                times[way].append(time.perf_counter() - began)
                assert set(got) == {digest}
                base = digest if way == "stream, whole" else ""
                shutil.rmtree(folder / f"v{version - 1}", ignore_errors=True)
            began = time.perf_counter()
            for number in range(WORKERS):
                shutil.copyfile(folder / f"v{version}" / "model.safetensors", folder / f"copy-{number}")
            times["plain copy"].append(time.perf_counter() - began)
            for number in range(WORKERS):
                (folder / f"copy-{number}").unlink()
    finally:
        for worker in workers:
            await worker.stop()
        await server.stop(0)
        await catalog.close()
        shutil.rmtree(folder, ignore_errors=True)
        memory.close()
    copy = min(times["plain copy"])
    print(f"delivery: {size / 1e6:.0f} MB to {WORKERS} workers of one host, the best of {rounds}")
    print("from the tensors of one process to the receipts of the others; MB/s of what all of them got")
    print(f"{'':18}{'ms':>8}{'MB/s':>8}{'of a plain copy':>17}")
    for way, taken in times.items():
        best = min(taken)
        print(f"{way:18}{best * 1e3:8.0f}{WORKERS * size / 1e6 / best:8.0f}{copy / best:16.0%}")
        figures[way] = {
            "milliseconds": best * 1e3,
            "megabytes_per_second": WORKERS * size / 1e6 / best,
            "of_a_plain_copy": copy / best,
        }
    print(f"{WORKERS * size / 1e6:.0f} MB verified by digest in each round and way")


def _publish(folder: Path, tensors: dict[str, torch.Tensor], model: Path, version: int, staging: Path) -> str:
    written = write_weights(
        folder / f"v{version}", tensors.items(), config_source_dir=model, version=version, fsync=False, staging=staging
    )
    return written.digest


def _change(tensors: dict[str, torch.Tensor]) -> None:
    """Change the last bit of one value in a hundred."""
    for tensor in tensors.values():
        flat = tensor.view(-1).view(torch.int16)
        flat[:: round(1 / SHARE)] ^= 1


def _module(model: Path) -> torch.nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(model, local_files_only=True)
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).requires_grad_(False)


class Worker:
    """A process that loads weights and returns the digest that it computed from them."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, number: int, model: Path) -> Worker:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, __file__, "--worker", f"inference-{number}", "--model", str(model)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        made = cls(process)
        assert await made._line() == "ready"
        return made

    async def take(self, digest: str, folder: Path, offers: list[pb.WeightsOffer]) -> str:
        assert self._process.stdin is not None
        order = {"digest": digest, "folder": str(folder), "offers": [offer.SerializeToString().hex() for offer in offers]}
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        await self._process.stdin.drain()
        return await self._line()

    async def stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()

    async def _line(self) -> str:
        assert self._process.stdout is not None
        return (await self._process.stdout.readline()).decode().strip()


async def work(name: str, model: Path) -> None:
    """A worker's process: one command per line, until the end of input."""
    torch.set_num_threads(1)
    engine = CurrentWeights(_module(model))
    services = Services("", NO_TOKEN, peer_token=TOKEN)
    with tempfile.TemporaryDirectory() as folder:
        cache = WeightsCache(RUN, folder, name, Fetcher(RUN, services))
        print("ready", flush=True)
        async for order in _orders():
            offers = [pb.WeightsOffer.FromString(bytes.fromhex(offer)) for offer in order["offers"]]
            source = await cache.bring(offers) if offers else order["folder"]
            staged = await asyncio.to_thread(engine.stage, source, order["digest"])
            assert staged == order["digest"], "the loaded weights have another digest"
            engine.load()
            print((await asyncio.to_thread(engine.digest)).root, flush=True)
        await services.close()
        cache.close()


async def _orders() -> AsyncIterator[Any]:
    lines: Iterator[str] = iter(sys.stdin.readline, "")
    while line := await asyncio.to_thread(next, lines, ""):
        yield json.loads(line)


if __name__ == "__main__":
    main()
