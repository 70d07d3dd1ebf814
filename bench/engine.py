"""Compares the embedded engine with `model.generate`: tokens/s, both in one process, alternating,
with ratios of medians.

    python bench/engine.py [--threads 2] [--repeat 5] [--model DIR] [--vllm PYTHON] [--cpu-time] [--check]

Cases, on a random 0.8 M parameter Qwen3 (or the model in DIR):

    equal   256 different prompts of 16 tokens, 64 new tokens each
    mixed   512 different prompts of 16 tokens; the i-th answer has a fixed length from a lognormal (sigma 1, mean 32, at
            most 128, seed 0). `generate` runs batches in order of arrival until their longest answer, in the best of
            several sizes; only the requested tokens count.
    group   32 prompts of 5 tokens, 8 samples each, 2 to 4 new tokens: the sampling of one small GRPO step

Each case also runs in deterministic mode. With `--vllm` the mixed case also runs on vLLM, in a
process of the interpreter PYTHON that waits while others run. With `--check` the exit code is 1 if
a ratio is below its bar.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("MKL_CBWR", "AUTO")  # like in workers
# ACTIVE because nothing else runs, unless there is another process
os.environ["OMP_WAIT_POLICY"] = "PASSIVE" if "--vllm" in sys.argv else "ACTIVE"

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from rollout_workers.engines.base import GroupRequest, SampleOutput, SamplingParams
from rollout_workers.engines.transformers import EngineConfig, TransformersEngine

BARS = {"equal": 0.9, "mixed": 2.0}
VLLM_BAR = 1.0


@dataclass(frozen=True)
class Case:
    """Prompts [n, T], the number of samples of each, and the number of new tokens of each sample (n
    * samples of them)."""

    name: str
    prompts: np.ndarray
    samples: int
    lengths: Sequence[int]
    batch_sizes: Sequence[int]

    @property
    def tokens(self) -> int:
        return int(sum(self.lengths))


def tiny_model() -> PreTrainedModel:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=50,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        tie_word_embeddings=True,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=None,
    )
    return Qwen3ForCausalLM(config).eval()


def lognormal_lengths(count: int, mean: float = 32, sigma: float = 1, longest: int = 128) -> list[int]:
    """Answer lengths with this mean before the limit is applied (mu = ln mean - sigma^2 / 2)."""
    drawn = np.random.default_rng(0).lognormal(np.log(mean) - sigma**2 / 2, sigma, count)
    return np.clip(np.rint(drawn), 1, longest).astype(int).tolist()


def cases(vocabulary: int, scale: int) -> list[Case]:
    """The three cases. ``scale`` divides the number of prompts, for larger models."""
    random = np.random.default_rng(0)

    def prompts(count: int, width: int) -> np.ndarray:
        return random.integers(0, vocabulary, (count, width))

    equal, mixed = 256 // scale, 512 // scale
    sizes = sorted({max(8, mixed // d) for d in (1, 2, 4, 8, 16)})
    return [
        Case("equal", prompts(equal, 16), 1, [64] * equal, (equal,)),
        Case("mixed", prompts(mixed, 16), 1, lognormal_lengths(mixed), sizes),
        Case("group", prompts(32 // scale, 5), 8, random.integers(2, 5, 256 // scale).tolist(), (256 // scale,)),
    ]


def generate(model: PreTrainedModel, case: Case, batch: int) -> None:
    """Sample everything with ``model.generate``, ``batch`` rows at a time."""
    generator: Any = model.generate
    rows = torch.from_numpy(case.prompts).repeat_interleave(case.samples, dim=0)
    for start in range(0, len(rows), batch):
        ids = rows[start : start + batch]
        new = max(case.lengths[start : start + batch])
        out = generator(ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, max_new_tokens=new, pad_token_id=0)
        assert out.shape == (len(ids), ids.shape[1] + new)


async def sample(engine: TransformersEngine, case: Case) -> None:
    """Sample everything with the engine. A group whose samples differ in length is sent as requests
    of one sample."""
    shared = case.samples > 1
    requests = []
    for i, prompt in enumerate(case.prompts):
        lengths = case.lengths[i * case.samples : (i + 1) * case.samples]
        for length in sorted(set(lengths)):
            seeds = tuple(s for s, n in enumerate(lengths) if n == length)
            params = SamplingParams(max_tokens=length, ignore_eos=True)
            requests.append(GroupRequest(f"{i}/{length}", prompt, seeds if shared else (i,), params))
    tokens = 0
    async for output in engine.generate(requests):
        assert isinstance(output, SampleOutput) and output.error is None
        tokens += len(output.token_ids)
    assert tokens == case.tokens


class Peer:
    """vLLM with the model of a folder, in a separate process."""

    def __init__(self, python: str, folder: str, case: Case, threads: int, slots: int) -> None:
        asked = {"folder": folder, "prompts": case.prompts.tolist(), "lengths": list(case.lengths), "slots": slots}
        self.process = subprocess.Popen(
            [python, str(Path(__file__).with_name("engine_peer.py"))], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=os.environ | {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"},
        )  # fmt: skip
        self._send(json.dumps(asked))
        assert self._answer() == "ready"

    def sample(self) -> None:
        """Sample everything."""
        self._send("go")
        assert self._answer() == "done"

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()

    def _send(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def _answer(self) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("peer: "):
                return line.removeprefix("peer: ").strip()
        raise RuntimeError("vLLM ended")


def seconds(function: Callable[[], object], clock: Callable[[], float]) -> float:
    started = clock()
    function()
    return clock() - started


def best_batch(model: PreTrainedModel, case: Case, clock: Callable[[], float]) -> int:
    """The batch size with which ``generate`` is fastest for this case (the better of two runs
    each)."""
    if len(case.batch_sizes) == 1:
        return case.batch_sizes[0]
    timed = {size: min(seconds(lambda s=size: generate(model, case, s), clock) for _ in range(2)) for size in case.batch_sizes}
    print(f"  generate by batch size: {', '.join(f'{s}: {case.tokens / t:,.0f} tok/s' for s, t in timed.items())}")
    return min(timed, key=timed.__getitem__)


def measure(
    model: PreTrainedModel, folder: str, case: Case, args: argparse.Namespace, loop: asyncio.AbstractEventLoop
) -> tuple[float, float | None]:
    """Run one case and print every round. Returns the ratios of the engine's default mode to
    `generate` and, if it ran, to vLLM."""
    longest = case.prompts.shape[1] + max(case.lengths)
    slots = min(args.slots, len(case.lengths))
    engines = {
        name: TransformersEngine(
            model, EngineConfig(slots=slots, max_len=longest, threads=args.threads, deterministic=name == "deterministic")
        )
        for name in ("engine", "deterministic")
    }
    print(f"{case.name}: {len(case.lengths)} samples, {case.tokens} tokens, {slots} slots")
    clock = time.process_time if args.cpu_time else time.perf_counter
    batch = best_batch(model, case, clock)
    sides: dict[str, Callable[[], object]] = {f"generate({batch})": lambda: generate(model, case, batch)}
    for name, engine in engines.items():
        sides[name] = lambda e=engine: loop.run_until_complete(sample(e, case))
    peer = Peer(args.vllm, folder, case, args.threads, slots) if args.vllm and case.name == "mixed" else None
    if peer is not None:
        sides["vllm"] = peer.sample
    for side in sides.values():
        side()
    times: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(1, args.repeat + 1):
        for name, side in sides.items():
            times[name].append(seconds(side, clock))
        print(f"  round {number}: " + ", ".join(f"{name} {case.tokens / taken[-1]:,.0f} tok/s" for name, taken in times.items()))
    if peer is not None:
        peer.close()
    for engine in engines.values():
        loop.run_until_complete(engine.shutdown())
    medians = {name: statistics.median(t) for name, t in times.items()}
    base = next(iter(medians.values()))
    for name, t in medians.items():
        print(f"  {name:<16}{case.tokens / t:>10,.0f} tok/s {t * 1e3:>9.1f} ms  x{base / t:.2f}")
    return base / medians["engine"], medians["vllm"] / medians["engine"] if "vllm" in medians else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--slots", type=int, default=256)
    parser.add_argument("--model", help="a model's folder instead of the tiny model; an eighth of the prompts")
    parser.add_argument("--vllm", metavar="PYTHON", help="interpreter with vLLM, to compare with it")
    parser.add_argument("--case", action="append", choices=("equal", "mixed", "group"))
    parser.add_argument("--cpu-time", action="store_true", help="CPU seconds, for a busy machine (with --threads 1)")
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(args.threads)
    torch.set_grad_enabled(False)
    model = AutoModelForCausalLM.from_pretrained(args.model).eval() if args.model else tiny_model()
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    loop = asyncio.new_event_loop()
    missed = []
    saved = tempfile.TemporaryDirectory()
    model.save_pretrained(saved.name)
    folder = args.model or saved.name
    for case in cases(model.config.vocab_size, 8 if args.model else 1):
        if args.case and case.name not in args.case:
            continue
        to_generate, to_vllm = measure(model, folder, case, args, loop)
        for peer, ratio, bar in (("generate", to_generate, BARS.get(case.name)), ("vLLM", to_vllm, VLLM_BAR)):
            if ratio is not None and bar is not None:
                print(f"  ratio to {peer} {ratio:.2f}, bar {bar}: {'met' if ratio >= bar else 'MISSED'}")
                if ratio < bar:
                    missed.append(case.name)
    saved.cleanup()
    return 1 if missed and args.check else 0


if __name__ == "__main__":
    sys.exit(main())
