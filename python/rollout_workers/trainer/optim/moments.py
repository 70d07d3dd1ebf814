"""AdamW's two moments over flat vectors, and its update: in float32, or in 8 bits."""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from rollout_workers.trainer.optim.flat import Flat
from rollout_workers.trainer.types import BadSettings

KINDS = ("exp_avg", "exp_avg_sq")
LARGEST = 1 << 30
"""Elements of one call of bitsandbytes, which passes sizes as 32-bit integers. A multiple of
``_BLOCK``."""
_BLOCK = 256  # elements per scale, as in bitsandbytes
_AT_ONCE = 1 << 22  # elements of a temporary in float32


@dataclass(frozen=True, slots=True)
class AdamWConfig:
    """Settings of AdamW (Loshchilov and Hutter, arXiv 1711.05101). ``max_grad_norm`` 0 turns
    clipping off."""

    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    max_grad_norm: float = 1.0
    kind: str = "adamw"
    """``adamw``, or ``adamw_8bit``: moments in 8 bits (arXiv 2110.02861), which needs
    bitsandbytes."""
    ema_decay: float = 0.0
    """Decay of an exponential moving average of the weights (Polyak and Juditsky 1992; Tarvainen
    and Valpola, arXiv 1703.01780): average = decay * average + (1 - decay) * weights after every
    update. 0: no average."""


class Moments(Protocol):
    """Moments of flat vectors, and the number of updates for the bias correction."""

    @property
    def steps(self) -> int:
        """Updates made."""
        ...

    @steps.setter
    def steps(self, count: int) -> None: ...

    def update(self, rate: float) -> None:
        """Update each vector's master copy by its gradient."""
        ...

    def stored(self, kind: str, number: int) -> Tensor:
        """[n]: the live moment of a vector, float32, or uint8 codes of ``values`` and ``scales``."""
        ...

    def put(self, kind: str, number: int, vector: Tensor) -> None:
        """Set a moment from float32 [n], which may be what ``stored`` returned."""
        ...

    def scales(self) -> dict[str, Tensor]:
        """The live scales of codes by ``<kind>/<number>``; empty in float32."""
        ...

    def values(self) -> dict[str, Tensor]:
        """float32 [256] by kind: the values of the codes; empty in float32."""
        ...

    def tensors(self) -> list[Tensor]:
        """The tensors that ``update`` changes, without the master copies."""
        ...


class FloatMoments:
    """Moments in float32, updated by torch's fused AdamW."""

    def __init__(self, flats: Sequence[Flat], config: AdamWConfig) -> None:
        self._flats = flats
        self._adamw = torch.optim.AdamW(
            [{"params": [flat.master], "weight_decay": flat.weight_decay} for flat in flats],
            lr=0.0,
            betas=(config.beta1, config.beta2),
            eps=config.epsilon,
            fused=True,
        )
        for flat in flats:
            steps = torch.zeros((), dtype=torch.float32, device=flat.master.device)
            self._adamw.state[flat.master] = {"step": steps, **{kind: torch.zeros_like(flat.master) for kind in KINDS}}

    @property
    def steps(self) -> int:
        """Updates made."""
        return int(self._adamw.state[self._flats[0].master]["step"])

    @steps.setter
    def steps(self, count: int) -> None:
        for flat in self._flats:
            self._adamw.state[flat.master]["step"].fill_(count)

    def update(self, rate: float) -> None:
        """See ``Moments``."""
        for flat, group in zip(self._flats, self._adamw.param_groups, strict=True):
            group["lr"] = rate
            flat.master.grad = flat.gradient
        self._adamw.step()

    def stored(self, kind: str, number: int) -> Tensor:
        """See ``Moments``."""
        return self._adamw.state[self._flats[number].master][kind]

    def put(self, kind: str, number: int, vector: Tensor) -> None:
        """See ``Moments``."""
        if vector is not (current := self.stored(kind, number)):
            current.copy_(vector)

    def scales(self) -> dict[str, Tensor]:
        """See ``Moments``."""
        return {}

    def values(self) -> dict[str, Tensor]:
        """See ``Moments``."""
        return {}

    def tensors(self) -> list[Tensor]:
        """See ``Moments``."""
        return [tensor for flat in self._flats for tensor in self._adamw.state[flat.master].values()]


class EightBitMoments:
    """One byte per element and a float32 per 256 elements, a quarter of the memory. bitsandbytes
    computes the update.

    A state holds codes and scales, so a snapshot needs no moment in float32. With another number of
    ranks the blocks differ, and the values are rounded again.
    """

    def __init__(self, flats: Sequence[Flat], config: AdamWConfig) -> None:
        """Raises ``BadSettings`` if bitsandbytes is not installed."""
        if importlib.util.find_spec("bitsandbytes") is None:
            raise BadSettings(
                '`train.optimizer = "adamw_8bit"` needs the package bitsandbytes, which is not installed; '
                'install the extra `rollout-workers[adamw-8bit]`, or set "adamw"'
            )
        self._library: Any = importlib.import_module("bitsandbytes.functional")
        self._flats, self._config = flats, config
        self._steps = torch.zeros((), dtype=torch.int64)
        values = {kind: self._library.create_dynamic_map(signed=kind == "exp_avg") for kind in KINDS}
        zeros = {kind: int(torch.bucketize(torch.zeros(()), _edges(values[kind]))) for kind in KINDS}
        self._maps = {kind: values[kind].to(flats[0].master.device) for kind in KINDS}
        self._codes: list[dict[str, Tensor]] = []
        self._scales: list[dict[str, Tensor]] = []
        for flat in flats:
            size, device = flat.master.numel(), flat.master.device
            self._codes.append({kind: torch.full((size,), zeros[kind], dtype=torch.uint8, device=device) for kind in KINDS})
            self._scales.append({kind: torch.zeros(-(-size // _BLOCK), device=device) for kind in KINDS})

    @property
    def steps(self) -> int:
        """Updates made."""
        return int(self._steps)

    @steps.setter
    def steps(self, count: int) -> None:
        self._steps.fill_(count)

    def update(self, rate: float) -> None:
        """See ``Moments``."""
        self._steps += 1
        config = self._config
        for flat, codes, scales in zip(self._flats, self._codes, self._scales, strict=True):
            for start in range(0, flat.master.numel(), LARGEST):
                part = slice(start, start + LARGEST)
                blocks = slice(start // _BLOCK, (start + LARGEST) // _BLOCK)
                self._library.optimizer_update_8bit_blockwise(
                    "adam",
                    flat.gradient[part],
                    flat.master[part],
                    codes["exp_avg"][part],
                    codes["exp_avg_sq"][part],
                    config.beta1,
                    config.beta2,
                    0.0,
                    0.0,
                    config.epsilon,
                    self.steps,
                    rate,
                    self._maps["exp_avg"],
                    self._maps["exp_avg_sq"],
                    scales["exp_avg"][blocks],
                    scales["exp_avg_sq"][blocks],
                    weight_decay=flat.weight_decay,
                )

    def stored(self, kind: str, number: int) -> Tensor:
        """See ``Moments``."""
        return self._codes[number][kind]

    def put(self, kind: str, number: int, vector: Tensor) -> None:
        """See ``Moments``."""
        edges, codes, scales = _edges(self._maps[kind]), self._codes[number][kind], self._scales[number][kind]
        for start in range(0, vector.numel(), _AT_ONCE):
            part = vector[start : start + _AT_ONCE]
            rows = torch.nn.functional.pad(part, (0, -part.numel() % _BLOCK)).view(-1, _BLOCK)
            largest = rows.abs().amax(1, keepdim=True)
            scales[start // _BLOCK :][: len(rows)].copy_(largest[:, 0])
            nearest = torch.bucketize(torch.where(largest > 0, rows / largest, 0.0), edges)
            codes[start : start + _AT_ONCE].copy_(nearest.view(-1)[: part.numel()])

    def scales(self) -> dict[str, Tensor]:
        """See ``Moments``."""
        return {f"{kind}/{number}": scales[kind] for number, scales in enumerate(self._scales) for kind in KINDS}

    def values(self) -> dict[str, Tensor]:
        """See ``Moments``."""
        return dict(self._maps)

    def tensors(self) -> list[Tensor]:
        """See ``Moments``."""
        return [self._steps, *(tensor for table in (*self._codes, *self._scales) for tensor in table.values())]


def decoded(kind: str, number: int, flat: Flat, name: str, tensors: Mapping[str, Tensor]) -> Tensor:
    """float32: a moment of a whole parameter in vector ``number``, from a state in which each rank
    has its own scales (``scales/<ranks>/<rank>/<kind>/<number>``), or in float32."""
    saved = tensors[f"{kind}/{name}"]
    if saved.dtype != torch.uint8:
        return saved
    ranks = next(int(key.split("/")[1]) for key in tensors if key.startswith("scales/"))
    before = [parameter.shape for _, parameter in flat.named[: [each for each, _ in flat.named].index(name)]]
    parts = []
    for rank, rows in enumerate(saved.chunk(ranks) if saved.dim() else (saved,)):
        first = sum(_elements(shape, ranks, rank) for shape in before)
        scales = tensors[f"scales/{ranks}/{rank}/{kind}/{number}"]
        places = torch.arange(first, first + rows.numel()) // _BLOCK
        parts.append(tensors[f"codes/{kind}"][rows.int()] * scales[places].view(rows.shape))
    return torch.cat(parts) if saved.dim() else parts[0]


def _elements(shape: Sequence[int], ranks: int, rank: int) -> int:
    """The elements of a parameter that a rank has: equal parts of its rows, then a shorter one,
    then none."""
    if not shape:
        return 1
    most = -(-shape[0] // ranks)
    return max(0, min(most, shape[0] - rank * most)) * math.prod(shape[1:])


def _edges(values: Tensor) -> Tensor:
    """The bounds between the values of neighboring codes."""
    return (values[1:] + values[:-1]) / 2


MOMENTS: dict[str, type[FloatMoments] | type[EightBitMoments]] = {"adamw": FloatMoments, "adamw_8bit": EightBitMoments}
