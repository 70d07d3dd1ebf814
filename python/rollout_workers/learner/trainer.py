"""The learner: batches in, weights forward by one step each."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rollout_workers.algorithms import Algorithm, LossTerms, TokenBatch, build_algorithm
from rollout_workers.algorithms.divergence import k3
from rollout_workers.learner.adapter import LoraConfig
from rollout_workers.learner.metrics import TokenSums, describe_batch
from rollout_workers.learner.optimizer import AdamWConfig, FlatAdamW
from rollout_workers.learner.packing import MicroBatch, pack
from rollout_workers.learner.policy import Logprobs, Policy
from rollout_workers.learner.reference import Reference
from rollout_workers.learner.schedule import Schedule
from rollout_workers.learner.state import load_state, save_state
from rollout_workers.learner.types import BadBatch, NonFiniteGradient, StepOutOfTurn, StepResult, TrainSample
from rollout_workers.weights import WeightsDigest, WeightsManifest, weights_digest, write_weights


@dataclass(frozen=True, slots=True)
class TrainerConfig:
    """Settings of a learner, by the names of the run config."""

    algorithm: str = "grpo"
    settings: Any = None
    """``SftConfig`` or ``GrpoConfig``; absent: the algorithm's defaults."""
    schedule: Schedule = field(default_factory=lambda: Schedule(peak=1e-6))
    optimizer: AdamWConfig = field(default_factory=AdamWConfig)
    temperature: float = 1.0
    """What completions were sampled with. 0 (greedy) counts as 1."""
    tokens_per_microbatch: int = 16_384
    """Most positions, padding included, of one forward and backward pass. Never changes the gradient beyond rounding."""
    threads: int = 0
    """CPU threads while a step runs; 0: all cores. Part of what makes bits repeatable."""
    dtype: torch.dtype = torch.float32
    seed: int = 0
    lora: LoraConfig | None = None
    """Adapters, which alone are trained; the reference model is then the model without them."""
    freeze: tuple[str, ...] = ()
    """Patterns over names of tensors that stay as they are."""
    gradient_checkpointing: bool = False


class Trainer:
    """A model in training.

    Deterministic: the same model, config and batches give the same bits, whatever the order within a batch, with the same
    number of threads. Not safe for use from two threads at a time; ``train_step`` blocks: call it from a thread beside an
    event loop. A step that raises leaves weights, optimizer and step as they were.
    """

    def __init__(self, model_dir: str | os.PathLike[str], config: TrainerConfig) -> None:
        """Load the model of a folder in the Hugging Face layout, at step 0. Raises ``OSError`` where it can't be loaded."""
        self.model_dir = Path(model_dir)
        self.config = config
        self.algorithm: Algorithm = build_algorithm(config.algorithm, config.settings)
        self.step = 0
        self._use_threads()
        torch.manual_seed(config.seed)
        self.policy = Policy.prepare(
            model_dir,
            dtype=config.dtype,
            lora=config.lora,
            frozen=config.freeze,
            checkpointing=config.gradient_checkpointing,
            seed=config.seed,
        )
        self._reference = Reference(self.policy, model_dir) if self.algorithm.needs.reference else None
        self.optimizer = FlatAdamW(self.policy.model, config.optimizer)

    def train_step(
        self,
        samples: Sequence[TrainSample],
        step: int,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> StepResult:
        """Make step ``step`` (one past ``self.step``) from a batch, in any order.

        ``on_progress`` is called with micro-batches done and in all. Raises ``StepOutOfTurn``, ``BadBatch``, or
        ``NonFiniteGradient``.
        """
        if step != self.step + 1:
            raise StepOutOfTurn(f"step {step} was asked for, but the learner stands at step {self.step}")
        started = time.perf_counter()
        self._use_threads()
        ordered = _in_order(samples)
        normalizer = float(sum(int(np.count_nonzero(sample.loss_mask[1:])) for sample in ordered))
        if not normalizer:
            raise BadBatch(f"step {step}: no token of the {len(ordered)} samples is trained on; see their loss masks")
        metrics = describe_batch(ordered, step=step, sampled=self.algorithm.needs.sampled)
        advantages, dull = self._advantages(ordered)
        batches = pack(
            ordered,
            self._with_gradient(advantages, len(ordered)),
            tokens=self.config.tokens_per_microbatch,
            share_prefixes=self.policy.share_prefixes,
        )
        packed = time.perf_counter()
        clock, sums, loss = _Clock(), TokenSums(), 0.0
        try:
            for done, batch in enumerate(batches):
                loss += self._accumulate(batch, advantages, normalizer, sums, clock)
                if on_progress is not None:
                    on_progress(done + 1, len(batches))
            norm = self.optimizer.norm()
            if not (math.isfinite(loss) and math.isfinite(norm)):
                raise NonFiniteGradient(
                    f"step {step}: loss {loss}, gradient norm {norm}. The step was not made. Look at the batch's logprobs and "
                    f"rewards, or lower the learning rate ({self.config.schedule.rate(step):g})"
                )
        except BaseException:
            self.optimizer.clear()
            raise
        rate = self.config.schedule.rate(step)
        with clock.measure("optimizer"):
            self.optimizer.step(rate, norm)
        self.step = step
        seconds = time.perf_counter() - started
        metrics |= sums.means() | dull | clock.seconds()
        metrics |= {
            "loss": loss,
            "grad_norm": norm,
            "learning_rate": rate,
            "tokens/trained": normalizer,
            "tokens/computed": float(sum(batch.computed for batch in batches)),
            "tokens_per_second": metrics["tokens"] / seconds,
            "samples_per_second": metrics["samples"] / seconds,
            "time/pack": packed - started,
            "time/step": seconds,
        }
        return StepResult(step=step, metrics=metrics)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The live weights under their Hugging Face names; they change with the next step. Adapters are merged in."""
        return self.policy.named_weights()

    def weights_digest(self) -> WeightsDigest:
        """Digest of the weights as they stand."""
        return weights_digest(self.named_weights())

    def write_weights(self, directory: str | os.PathLike[str], *, fsync: bool = True) -> WeightsManifest:
        """Write the weights as a folder that ``from_pretrained`` loads; the step is their version."""
        return write_weights(directory, self.named_weights(), config_source_dir=self.model_dir, version=self.step, fsync=fsync)

    def save_state(self, directory: str | os.PathLike[str]) -> list[Path]:
        """Write all that ``load_state`` needs to go on bit for bit. Returns the files, relative to the folder."""
        return save_state(Path(directory), self)

    def load_state(self, directory: str | os.PathLike[str]) -> None:
        """Stand where ``save_state`` stood. Raises ``StateUnreadable``, and then the trainer is as it was."""
        load_state(Path(directory), self)

    def _advantages(self, samples: Sequence[TrainSample]) -> tuple[Tensor | None, dict[str, float]]:
        """float64 [S], and the share of groups without any; nothing where the algorithm takes no rewards."""
        if self.algorithm.advantages is None:
            return None, {}
        keys = {key: number for number, key in enumerate(dict.fromkeys(sample.group_key for sample in samples))}
        rewards = torch.tensor([sample.reward for sample in samples], dtype=torch.float64)
        if not bool(rewards.isfinite().all()):
            raise BadBatch("a reward is infinite or not a number; such a sample must be excluded, never trained on")
        groups = torch.tensor([keys[sample.group_key] for sample in samples])
        advantages = self.algorithm.advantages(rewards, groups)
        active = torch.zeros(len(keys)).index_add_(0, groups, (advantages != 0).float())
        return advantages, {"zero_advantage_groups": float((active == 0).float().mean())}

    def _with_gradient(self, advantages: Tensor | None, count: int) -> list[int]:
        """The samples that must be computed: advantage 0 gives no gradient unless the loss has other terms."""
        if advantages is None or self.algorithm.needs.every_token:
            return list(range(count))
        return advantages.nonzero()[:, 0].tolist()

    def _accumulate(
        self, batch: MicroBatch, advantages: Tensor | None, normalizer: float, sums: TokenSums, clock: _Clock
    ) -> float:
        """Add a micro-batch's gradient; returns its part of the loss."""
        with clock.measure("forward"):
            policy = self.policy.logprobs(batch, temperature=self._temperature)
            terms = self._loss(batch, policy, advantages, normalizer)
            loss = float(terms.loss.detach())
            sums.add(len(batch.target), self._measure(batch, policy, terms))
        with clock.measure("backward"):
            gradients = torch.autograd.grad(terms.loss, self.optimizer.parameters, allow_unused=True)
            self.optimizer.add(gradients)
        return loss

    def _loss(self, batch: MicroBatch, policy: Logprobs, advantages: Tensor | None, normalizer: float) -> LossTerms:
        device = policy.tokens.device
        needs = self.algorithm.needs
        reference = None
        if self._reference is not None:
            reference = self._reference.logprobs(batch, temperature=self._temperature)
        return self.algorithm.loss(
            TokenBatch(
                logprobs=policy.tokens,
                normalizer=normalizer,
                advantages=None if advantages is None else advantages[batch.sample].float().to(device),
                engine_logprobs=torch.from_numpy(batch.engine_logprobs).to(device) if needs.engine_logprobs else None,
                reference_logprobs=reference,
            )
        )

    def _measure(self, batch: MicroBatch, policy: Logprobs, terms: LossTerms) -> dict[str, Tensor]:
        """Sums over the tokens of a micro-batch of what is measured on every algorithm."""
        sums = dict(terms.sums)
        repeats = torch.from_numpy(np.bincount(batch.predictor, minlength=len(batch.predictors)))
        sums["entropy"] = (policy.entropy * repeats.to(policy.entropy.device)).sum()
        if self.algorithm.needs.sampled:
            engine = torch.from_numpy(batch.engine_logprobs).to(policy.tokens.device)
            sums["kl/engine_learner"] = k3(engine, policy.tokens.detach()).sum()
        return sums

    @property
    def _temperature(self) -> float:
        return self.config.temperature or 1.0

    def _use_threads(self) -> None:
        threads = self.config.threads or os.cpu_count() or 1
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)


class _Clock:
    """Adds up the seconds of the phases of a step."""

    def __init__(self) -> None:
        self._seconds = {"forward": 0.0, "backward": 0.0, "optimizer": 0.0}

    def measure(self, phase: str) -> _Measure:
        return _Measure(self._seconds, phase)

    def seconds(self) -> dict[str, float]:
        return {f"time/{phase}": seconds for phase, seconds in self._seconds.items()}


class _Measure:
    def __init__(self, seconds: dict[str, float], phase: str) -> None:
        self._seconds, self._phase = seconds, phase

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._seconds[self._phase] += time.perf_counter() - self._started


def _in_order(samples: Sequence[TrainSample]) -> list[TrainSample]:
    """The samples by group and place, after a look at their shapes. Raises ``BadBatch``."""
    if not samples:
        raise BadBatch("the batch holds no sample")
    for sample in samples:
        length = len(sample.token_ids)
        if not (length == len(sample.loss_mask) == len(sample.logprobs) and 0 <= sample.prompt_length <= length):
            raise BadBatch(
                f"sample {sample.sample} of group {sample.group_key}: {length} tokens, {len(sample.loss_mask)} mask values, "
                f"{len(sample.logprobs)} logprobs, prompt of {sample.prompt_length}; the three must be equal, the prompt "
                "no longer"
            )
    return sorted(samples, key=lambda sample: (sample.group_key, sample.sample))
