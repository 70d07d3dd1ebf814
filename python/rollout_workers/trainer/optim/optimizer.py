"""AdamW over flat vectors: one for matrices, which decay, one for norms and biases, which don't.

Many small tensors cost more in calls than in arithmetic (tiny model, 46 tensors, 2 threads: 4.2 ms a step one by one, 0.5 ms
flat). The parameters of the model become views of the flat vectors. A model in bfloat16 keeps a float32 master copy,
since an update of 1e-6 would round away. Of a parameter that is sharded over ranks the vector holds this rank's rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from rollout_workers.trainer.distributed.shards import assign, sharded_like
from rollout_workers.trainer.optim.flat import Flat
from rollout_workers.trainer.optim.moments import KINDS, MOMENTS, AdamWConfig, Moments


class FlatAdamW:
    """AdamW that owns the storage of a model's parameters and gradients.

    ``add`` gradients of each micro-batch, then ``step`` or ``clear``. Parameters that are tied count once; those that need
    no gradient are left alone.
    """

    def __init__(self, model: nn.Module, config: AdamWConfig, *, beside: nn.Module | None = None) -> None:
        """beside: what is trained with the model but is no part of it; its names begin with ``beside.``. Raises ``BadSettings``
        where the config asks for what is not installed."""
        self.config = config
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        if beside is not None:
            named += [(f"beside.{name}", p) for name, p in beside.named_parameters()]
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
        pairs = [(held, new) for held, new in zip(self._gradients, gradients, strict=True) if new is not None]
        if self._empty and len(pairs) == len(self._gradients):
            torch._foreach_copy_([held for held, _ in pairs], [new for _, new in pairs])  # pyright: ignore[reportPrivateImportUsage]
        else:
            if self._empty:
                self._zero()
            torch._foreach_add_([held for held, _ in pairs], [new for _, new in pairs])  # pyright: ignore[reportPrivateImportUsage]
        self._empty = False

    def norm(self) -> float:
        """Euclidean norm of the whole gradient, of this rank's part where it is sharded; infinite or not a number where an
        element is."""
        if self._empty:
            return 0.0
        return float(torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(f.gradient) for f in self._groups])))

    def step(self, rate: float, norm: float) -> None:
        """Clip by the known ``norm``, update with the learning rate ``rate``, clear the gradient."""
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
        """Forget the gradient."""
        self._empty = True

    @property
    def steps(self) -> int:
        """Updates made; the bias correction counts them."""
        return self._moments.steps

    def moments(self) -> dict[str, Tensor]:
        """The state by name: ``exp_avg/<parameter>``, ``exp_avg_sq/<parameter>``, ``master/<parameter>`` where the model is not
        float32 itself, and ``average/<parameter>`` where one is kept. float32, in the parameter's shape and sharded as it is;
        live ones, but for moments in 8 bits."""
        found: dict[str, Tensor] = {}
        for kind in KINDS:
            found |= self._named(kind, [self._moments.vector(kind, number) for number in range(len(self._groups))])
        if any(flat.rounds for flat in self._groups):
            found |= self._named("master", [flat.master for flat in self._groups])
        return found | self.averages()

    def averages(self) -> dict[str, Tensor]:
        """``average/<parameter>``: of the parameters over the updates, as ``moments`` has it; empty where none is kept."""
        return self._named("average", self._averages)

    def scales(self) -> dict[str, Tensor]:
        """Of moments in 8 bits, of this rank: what tells their bits, beside ``moments``."""
        return self._moments.scales()

    def load_moments(self, tensors: Mapping[str, Tensor], *, steps: int, scales: Mapping[str, Tensor] | None = None) -> None:
        """Set what ``moments`` names, and the count of steps for the bias correction, once the parameters are set. scales: this
        rank's, where it had the same part. An average that ``tensors`` lacks begins at the parameters. Raises ``KeyError`` for
        another one that is missing."""
        self._moments.steps = steps
        for number, flat in enumerate(self._groups):
            flat.read()
            if flat.rounds:
                self._fill(flat, flat.master, "master", tensors)
            for kind in KINDS:
                vector = self._moments.vector(kind, number)
                self._fill(flat, vector, kind, tensors)
                self._moments.put(kind, number, vector, (scales or {}).get(f"{kind}/{number}"))
            flat.publish()
        kept = any(name.startswith("average/") for name in tensors)
        for average, flat in zip(self._averages, self._groups, strict=False):
            if kept:
                self._fill(flat, average, "average", tensors)
            else:
                average.copy_(flat.master)
        self._empty = True

    def remember(self) -> list[Tensor]:
        """A copy of all that ``step`` changes."""
        return [tensor.clone() for tensor in self._held()]

    def recall(self, copies: Sequence[Tensor]) -> None:
        """Stand where ``remember`` stood."""
        for tensor, copy in zip(self._held(), copies, strict=True):
            tensor.copy_(copy)
        for flat in self._groups:
            flat.publish()
        self._empty = True

    def _held(self) -> Iterator[Tensor]:
        yield from (flat.master for flat in self._groups)
        yield from self._moments.held()
        yield from self._averages

    def _named(self, kind: str, vectors: Sequence[Tensor]) -> dict[str, Tensor]:
        """``<kind>/<parameter>`` of a vector for each group; none of no vectors."""
        return {
            f"{kind}/{name}": sharded_like(part, parameter)
            for flat, vector in zip(self._groups, vectors, strict=False)
            for (name, part), (_, parameter) in zip(flat.views(vector), flat.named, strict=True)
        }

    def _fill(self, flat: Flat, vector: Tensor, kind: str, tensors: Mapping[str, Tensor]) -> None:
        """Set a vector from whole tensors by the parameters' names."""
        for (name, parameter), (_, part) in zip(flat.named, flat.views(vector), strict=True):
            assign(sharded_like(part, parameter), tensors[f"{kind}/{name}"])

    def _zero(self) -> None:
        for flat in self._groups:
            flat.gradient.zero_()


def _kind(parameter: nn.Parameter) -> tuple[bool, torch.dtype]:
    """What lies in one flat vector: whether it decays, and the type."""
    return parameter.dim() >= 2, parameter.dtype
