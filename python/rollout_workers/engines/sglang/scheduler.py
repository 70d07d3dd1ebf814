"""What runs inside SGLang's processes: the sampler, penalties, and the digest of the weights.

``run_scheduler`` puts these in place before SGLang's own main function runs. SGLang is imported
here at the top, so only its environment can import this module.
"""
# pyright: reportMissingImports=false

from __future__ import annotations

import hashlib
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from sglang.srt.layers.linear import MergedColumnParallelLinear, QKVParallelLinear
from sglang.srt.layers.sampler import Sampler
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding
from sglang.srt.managers.detokenizer_manager import run_detokenizer_process
from sglang.srt.managers.scheduler import Scheduler, run_scheduler_process
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from torch import Tensor, nn

from rollout_workers.engines.sglang.sampling import PENALTIES
from rollout_workers.engines.transformers.philox import uniforms
from rollout_workers.weights import weights_digest


def sample_from_probs(sampler: Sampler, probs: Tensor, sampling_info: Any, positions: Tensor, simple_sampling_case: bool) -> Any:
    """Draw one token per row with the seed of its request; replaces a method of ``Sampler``.

    SGLang draws with seeds only in deterministic mode, which needs a GPU, and its logprobs ignore
    top_k, top_p, and min_p. probs f32[B, V] is filtered in place, and the caller computes the
    logprobs from it.
    """
    if not simple_sampling_case:
        filter_(probs, sampling_info.top_ks, sampling_info.top_ps, sampling_info.min_ps)
    numbers = torch.from_numpy(drawn(sampling_info.sampling_seed.cpu().numpy(), positions.cpu().numpy()))
    cumulated = probs.cumsum(dim=-1, dtype=torch.float64)
    wanted = numbers.to(probs.device).unsqueeze(-1) * cumulated[:, -1:]
    tokens = torch.searchsorted(cumulated, torch.minimum(wanted, cumulated[:, -1:] * (1 - 2.0**-50)), right=True)
    return tokens.squeeze(-1).to(torch.int32), None


def drawn(seeds: Any, positions: Any) -> Any:
    """f64[B] in [0, 1): the number of each seed (int64) at a position of the sequence."""
    return uniforms(seeds.astype(np.uint64), positions.astype(np.int64) // 2 * 2, 2)[np.arange(len(seeds)), positions % 2]


def filter_(probs: Tensor, top_ks: Tensor, top_ps: Tensor, min_ps: Tensor) -> None:
    """Set the probabilities [B, V] of tokens that top_k, top_p, or min_p drops to 0 and normalize
    the others. Each filter applies to the result of the one before."""
    ordered, index = probs.sort(dim=-1, descending=True, stable=True)
    ordered[torch.arange(ordered.shape[-1], device=probs.device) >= top_ks.view(-1, 1)] = 0.0
    ordered /= ordered.sum(dim=-1, keepdim=True)
    ordered[(ordered.cumsum(dim=-1) - ordered) >= top_ps.view(-1, 1)] = 0.0
    ordered[ordered < ordered[:, :1] * min_ps.view(-1, 1)] = 0.0
    ordered /= ordered.sum(dim=-1, keepdim=True)
    probs.scatter_(-1, index, ordered)


class Penalties(CustomLogitProcessor):
    """Applies penalties and ``min_tokens`` as ``SamplingParams`` defines them."""

    def __call__(self, logits: Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> Tensor:
        for row, params in enumerate(custom_param_list or ()):
            wanted = json.loads(params[PENALTIES])
            request = params["__req__"]
            ids = torch.tensor([*request.origin_input_ids, *request.output_ids], device=logits.device)
            penalize_(logits[row], ids[: wanted["prompt"]], ids[wanted["prompt"] :], wanted)
        return logits


def penalize_(logits: Tensor, prompt: Tensor, sampled: Tensor, wanted: dict[str, Any]) -> None:
    """Change the logits [V] of one sample in place. wanted: see ``engine_params``."""
    if wanted["repetition"] != 1:
        before = torch.cat([prompt, sampled]).unique()
        values = logits[before]
        logits[before] = torch.where(values < 0, values * wanted["repetition"], values / wanted["repetition"])
    if len(sampled) and (wanted["presence"] or wanted["frequency"]):
        tokens, counts = sampled.unique(return_counts=True)
        logits[tokens] -= wanted["presence"] + wanted["frequency"] * counts.to(logits.dtype)
    if len(sampled) < wanted["min_tokens"] and wanted["ends"]:
        logits[wanted["ends"]] = float("-inf")


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a model of SGLang under their Hugging Face names, of one rank: fused
    projections are split, and rows that pad the vocabulary are left out."""
    modules = dict(model.named_modules(remove_duplicate=False))
    for name, tensor in model.state_dict(keep_vars=True).items():
        parent, _, kind = name.rpartition(".")
        module: Any = modules[parent]
        path = parent.rpartition(".")
        if isinstance(module, QKVParallelLinear) and path[2] == "qkv_proj":
            yield from _split(path[0], kind, tensor, module.output_sizes, ("q_proj", "k_proj", "v_proj"))
        elif isinstance(module, MergedColumnParallelLinear) and path[2] == "gate_up_proj":
            yield from _split(path[0], kind, tensor, module.output_sizes, ("gate_proj", "up_proj"))
        elif isinstance(module, VocabParallelEmbedding):
            yield name, tensor.detach()[: module.org_vocab_size]
        else:
            yield name, tensor.detach()


def _split(parent: str, kind: str, tensor: Tensor, sizes: list[int], names: tuple[str, ...]) -> Iterator[tuple[str, Tensor]]:
    for name, part in zip(names, tensor.detach().split(list(sizes)), strict=True):
        yield f"{parent}.{name}.{kind}", part


def write_digest(scheduler: Any, path: str, dtypes: dict[str, str]) -> None:
    """Write the root of the digest over the tensors ``dtypes`` (name to dtype) to ``path``. Called
    as a method of the scheduler. Raises ``LookupError`` for a tensor that SGLang does not store
    under a known name."""
    stored = dict(named_tensors(scheduler.tp_worker.model_runner.model))
    missing = sorted(dtypes.keys() - stored.keys())
    if missing:
        raise LookupError(f"SGLang has no tensor {missing[0]!r} ({len(missing)} of {len(dtypes)} are missing)")
    tensors = ((name, stored[name].to(getattr(torch, dtype))) for name, dtype in dtypes.items())
    Path(path).write_text(weights_digest(tensors).root)


def keep_copy(scheduler: Any) -> None:
    """Copy this rank's weights to the host."""
    state = scheduler.tp_worker.model_runner.model.state_dict()
    scheduler.rollout_copy = {name: tensor.to("cpu", copy=True) for name, tensor in state.items()}


def load_copy(scheduler: Any) -> None:
    """Load the copy of ``keep_copy`` into this rank's model."""
    scheduler.tp_worker.model_runner.model.load_state_dict(scheduler.rollout_copy)


def run_scheduler(*args: Any, **kwargs: Any) -> None:
    """The main function of a scheduler process."""
    Scheduler.rollout_digest, Scheduler.rollout_keep, Scheduler.rollout_restore = write_digest, keep_copy, load_copy
    Sampler._sample_from_probs = sample_from_probs
    from_schedule_batch = SamplingBatchInfo.from_schedule_batch

    def with_seeds(batch: Any, vocab_size: int) -> SamplingBatchInfo:
        info = from_schedule_batch(batch, vocab_size)
        for request in batch.reqs:  # SGLang gives all requests without a seed the same one
            if request.sampling_params.sampling_seed is None:
                name = hashlib.blake2b(request.rid.encode(), digest_size=7)
                request.sampling_params.sampling_seed = int.from_bytes(name.digest())
        seeds = [request.sampling_params.sampling_seed for request in batch.reqs]
        info.sampling_seed = torch.tensor(seeds, dtype=torch.int64, device=info.temperatures.device)
        return info

    SamplingBatchInfo.from_schedule_batch = staticmethod(with_seeds)
    _keep_parent_alive()
    run_scheduler_process(*args, **kwargs)


def run_detokenizer(*args: Any, **kwargs: Any) -> None:
    """The main function of the detokenizer process."""
    _keep_parent_alive()
    run_detokenizer_process(*args, **kwargs)


def _keep_parent_alive() -> None:
    """A process of SGLang that fails sends SIGQUIT to its parent, here the worker. The worker
    notices that the process ended, and reports it."""
    send = psutil.Process.send_signal

    def quiet(self: psutil.Process, sig: int) -> None:
        if sig != signal.SIGQUIT:
            send(self, sig)

    psutil.Process.send_signal = quiet
