"""AdamW over flat vectors: one for matrices, with weight decay, and one for norms and biases,
without.

Many small tensors cost more in calls than in arithmetic (tiny model, 46 tensors, 2 threads: 4.2 ms
per step one by one, 0.5 ms flat). The parameters of the model become views of the flat vectors. A
model in bfloat16 has a float32 master copy, because it would round an update of 1e-6 away. If a
parameter is sharded over ranks, the vector has this rank's rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from rollout_workers.trainer.distributed.shards import assign, sharded_like
from rollout_workers.trainer.optim.flat import Flat
from rollout_workers.trainer.optim.moments import KINDS, MOMENTS, AdamWConfig, Moments, decoded


class FlatAdamW:
    """AdamW that owns the storage of a model's parameters and gradients.

    ``add`` the gradients of each micro-batch, then ``step`` or ``clear``. Tied parameters count
    once; parameters without ``requires_grad`` are skipped.
    """

    def __init__(self, model: nn.Module, config: AdamWConfig, *, extra: nn.Module | None = None) -> None:
        """extra: a module that is trained with the model, under names that begin with ``extra.``.
        Raises ``BadSettings`` if the config needs a package that is not installed."""
        self.config = config
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        if extra is not None:
            named += [(f"extra.{name}", p) for name, p in extra.named_parameters()]
        self.parameters = [p for _, p in named]
        kinds = sorted({_kind(p) for p in self.parameters}, key=str)
        self._groups = [
            Flat([(name, p) for name, p in named if _kind(p) == kind], config.weight_decay if kind[0] else 0.0) for kind in kinds
        ]
        gradients = {name: part for flat in self._groups for name, part in flat.views(flat.gradient)}
        self._gradients = [gradients[name] for name, _ in named]
        self._moments: Moments = MOMENTS[config.kind](self._groups, config)
        self._averages = [flat.master.clone() for flat in self._groups] if config.ema_decay else []
        self._empty = True

    def add(self, gradients: Sequence[Tensor | None]) -> None:
        """Add the gradients of one micro-batch, in the order of ``parameters``."""
        pairs = [(total, new) for total, new in zip(self._gradients, gradients, strict=True) if new is not None]
        if not pairs:
            return
        if self._empty and len(pairs) == len(self._gradients):
            torch._foreach_copy_([total for total, _ in pairs], [new for _, new in pairs])  # pyright: ignore[reportPrivateImportUsage]
        else:
            if self._empty:
                self._zero()
            torch._foreach_add_([total for total, _ in pairs], [new for _, new in pairs])  # pyright: ignore[reportPrivateImportUsage]
        self._empty = False

    def norm(self) -> float:
        """The L2 norm of the gradient, or of this rank's part of it; infinite or NaN if an element
        is."""
        if self._empty:
            return 0.0
        return float(torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(f.gradient) for f in self._groups])))

    def step(self, rate: float, norm: float) -> None:
        """Clip the gradient, whose norm is ``norm``, update with learning rate ``rate``, and clear
        the gradient."""
        if self._empty:
            self._zero()
        limit = self.config.max_grad_norm
        if limit and norm > limit:
            for flat in self._groups:
                flat.gradient.mul_(limit / (norm + 1e-6))
        self._moments.update(rate)
        for flat in self._groups:
            flat.publish()
        for average, flat in zip(self._averages, self._groups, strict=False):
            average.lerp_(flat.master, 1 - self.config.ema_decay)
        self._empty = True

    def clear(self) -> None:
        """Discard the gradient."""
        self._empty = True

    @property
    def steps(self) -> int:
        """The number of updates, for the bias correction."""
        return self._moments.steps

    def moments(self) -> dict[str, Tensor]:
        """The state by name: ``exp_avg/<parameter>``, ``exp_avg_sq/<parameter>``,
        ``master/<parameter>`` if the model is not float32, and ``average/<parameter>`` if the
        config has ``ema_decay``.

        Live, shaped and sharded like the parameter, in float32; moments in 8 bits are uint8 codes
        of ``codes`` and ``scales``.
        """
        found: dict[str, Tensor] = {}
        for kind in KINDS:
            found |= self._named(kind, [self._moments.stored(kind, number) for number in range(len(self._groups))])
        if any(flat.rounds for flat in self._groups):
            found |= self._named("master", [flat.master for flat in self._groups])
        return found | self.averages()

    def averages(self) -> dict[str, Tensor]:
        """The part of ``moments`` under ``average/``: exponential moving averages of the
        parameters."""
        return self._named("average", self._averages)

    def scales(self) -> dict[str, Tensor]:
        """The live scales of this rank's 8-bit moments, ``<kind>/<number>``."""
        return self._moments.scales()

    def codes(self) -> dict[str, Tensor]:
        """The values of the codes of 8-bit moments, ``codes/<kind>``."""
        return {f"codes/{kind}": values for kind, values in self._moments.values().items()}

    def load_moments(self, tensors: Mapping[str, Tensor], *, steps: int, rank: int = 0, ranks: int = 1) -> None:
        """Load whole tensors that ``moments`` and ``codes`` returned, with the scales of each rank
        as ``scales/<ranks>/<rank>/<kind>/<number>``, and the number of updates; load the parameters
        before.

        rank, ranks: this one, and their number. If ``tensors`` has no averages, they start at the
        parameters. Raises ``KeyError`` for any other missing tensor.
        """
        self._moments.steps = steps
        prefix = f"scales/{ranks}/{rank}/"
        scales = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
        for number, flat in enumerate(self._groups):
            flat.read()
            if flat.rounds:
                self._fill(flat, flat.master, "master", tensors)
            for kind in KINDS:
                self._load_moment(kind, number, flat, tensors, scales.get(f"{kind}/{number}"))
            flat.publish()
        kept = any(name.startswith("average/") for name in tensors)
        for average, flat in zip(self._averages, self._groups, strict=False):
            if kept:
                self._fill(flat, average, "average", tensors)
            else:
                average.copy_(flat.master)
        self._empty = True

    def snapshot(self) -> list[Tensor]:
        """A copy of every tensor that ``step`` changes."""
        return [tensor.clone() for tensor in self._tensors()]

    def restore(self, copies: Sequence[Tensor]) -> None:
        """Return to a ``snapshot``."""
        for tensor, copy in zip(self._tensors(), copies, strict=True):
            tensor.copy_(copy)
        for flat in self._groups:
            flat.publish()
        self._empty = True

    def _tensors(self) -> Iterator[Tensor]:
        yield from (flat.master for flat in self._groups)
        yield from self._moments.tensors()
        yield from self._averages

    def _named(self, kind: str, vectors: Sequence[Tensor]) -> dict[str, Tensor]:
        """The parts of one vector per group as ``<kind>/<parameter>``; empty for no vectors."""
        return {
            f"{kind}/{name}": sharded_like(part, parameter)
            for flat, vector in zip(self._groups, vectors, strict=False)
            for (name, part), (_, parameter) in zip(flat.views(vector), flat.named, strict=True)
        }

    def _load_moment(self, kind: str, number: int, flat: Flat, tensors: Mapping[str, Tensor], scales: Tensor | None) -> None:
        """Load one moment of a vector. scales: this rank's, if the codes are of as many ranks."""
        stored, own = self._moments.stored(kind, number), self._moments.scales().get(f"{kind}/{number}")
        if own is not None and scales is not None and own.shape == scales.shape:
            own.copy_(scales)
            self._fill(flat, stored, kind, tensors)
            return
        vector = torch.empty_like(flat.master) if own is not None else stored
        for (name, parameter), (_, part) in zip(flat.named, flat.views(vector), strict=True):
            assign(sharded_like(part, parameter), decoded(kind, number, flat, name, tensors))
        self._moments.put(kind, number, vector)

    def _fill(self, flat: Flat, vector: Tensor, kind: str, tensors: Mapping[str, Tensor]) -> None:
        """Fill a vector from whole tensors under the parameters' names."""
        for (name, parameter), (_, part) in zip(flat.named, flat.views(vector), strict=True):
            assign(sharded_like(part, parameter), tensors[f"{kind}/{name}"])

    def _zero(self) -> None:
        for flat in self._groups:
            flat.gradient.zero_()


class OptimizerSet:
    """The policy's optimizer and, if the critic has its own, the critic's, as one."""

    def __init__(self, policy: FlatAdamW, critic: FlatAdamW | None) -> None:
        self._optimizers = [policy] if critic is None else [policy, critic]
        self.parameters = [parameter for optimizer in self._optimizers for parameter in optimizer.parameters]

    def add(self, gradients: Sequence[Tensor | None]) -> None:
        """Add the gradients of a micro-batch, in the order of ``parameters``."""
        first = 0
        for optimizer in self._optimizers:
            stop = first + len(optimizer.parameters)
            optimizer.add(gradients[first:stop])
            first = stop

    def norms(self) -> list[float]:
        """The gradient norm of each optimizer."""
        return [optimizer.norm() for optimizer in self._optimizers]

    def step(self, rates: tuple[float, float], norms: Sequence[float]) -> None:
        """Update with the learning rates of policy and critic; with a rate of 0 for the policy, the
        critic alone. norms: of the whole batch."""
        for optimizer, rate, norm in zip(self._optimizers, rates, norms, strict=False):
            if rate or optimizer is not self._optimizers[0]:
                optimizer.step(rate, norm)
            else:
                optimizer.clear()

    def clear(self) -> None:
        """Discard the gradients."""
        for optimizer in self._optimizers:
            optimizer.clear()

    def snapshot(self) -> list[list[Tensor]]:
        """A copy of every tensor that ``step`` changes."""
        return [optimizer.snapshot() for optimizer in self._optimizers]

    def restore(self, copies: Sequence[Sequence[Tensor]]) -> None:
        """Return to a ``snapshot``."""
        for optimizer, tensors in zip(self._optimizers, copies, strict=True):
            optimizer.restore(tensors)


def _kind(parameter: nn.Parameter) -> tuple[bool, torch.dtype]:
    """Parameters of one kind share a flat vector: whether weight decay applies, and the dtype."""
    return parameter.dim() >= 2, parameter.dtype
