"""AdamW's two moments over flat vectors, and its update: in float32, or in 8 bits."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from rollout_workers.trainer.optim.flat import Flat
from rollout_workers.trainer.types import BadSettings

KINDS = ("exp_avg", "exp_avg_sq")
_BLOCK = 256  # elements per scale, as in bitsandbytes


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

    def vector(self, kind: str, number: int) -> Tensor:
        """float32 [n]: a moment of a vector. It is live, or a copy: pass changes to ``put``."""
        ...

    def put(self, kind: str, number: int, vector: Tensor, scales: Tensor | None) -> None:
        """Set a moment. scales: its scales from ``scales``; None: compute them."""
        ...

    def scales(self) -> dict[str, Tensor]:
        """The scales by ``<kind>/<number>``; ``vector`` alone does not determine the stored
        bits."""
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

    def vector(self, kind: str, number: int) -> Tensor:
        """The live tensor."""
        return self._adamw.state[self._flats[number].master][kind]

    def put(self, kind: str, number: int, vector: Tensor, scales: Tensor | None) -> None:
        """Does nothing: ``vector`` is live."""

    def scales(self) -> dict[str, Tensor]:
        """Empty: float32 has no scales."""
        return {}

    def tensors(self) -> list[Tensor]:
        """See ``Moments``."""
        return [tensor for flat in self._flats for tensor in self._adamw.state[flat.master].values()]


class EightBitMoments:
    """One byte per element and a float32 per 256 elements, a quarter of the memory. bitsandbytes
    computes the update.

    A state holds values and scales; together they give the same codes again. With another number of
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
        self._maps = {
            kind: self._library.create_dynamic_map(signed=kind == "exp_avg").to(flats[0].master.device) for kind in KINDS
        }
        self._codes: list[dict[str, Tensor]] = []
        self._scales: list[dict[str, Tensor]] = []
        for number, flat in enumerate(flats):
            size, device = flat.master.numel(), flat.master.device
            self._codes.append({kind: torch.zeros(size, dtype=torch.uint8, device=device) for kind in KINDS})
            self._scales.append({kind: torch.zeros(-(-size // _BLOCK), device=device) for kind in KINDS})
            for kind in KINDS:
                self.put(kind, number, torch.zeros_like(flat.master), None)

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
            if not flat.master.numel():
                continue
            self._library.optimizer_update_8bit_blockwise(
                "adam",
                flat.gradient,
                flat.master,
                codes["exp_avg"],
                codes["exp_avg_sq"],
                config.beta1,
                config.beta2,
                0.0,
                0.0,
                config.epsilon,
                self.steps,
                rate,
                self._maps["exp_avg"],
                self._maps["exp_avg_sq"],
                scales["exp_avg"],
                scales["exp_avg_sq"],
                weight_decay=flat.weight_decay,
            )

    def vector(self, kind: str, number: int) -> Tensor:
        """A copy of the moment."""
        return self._maps[kind][self._codes[number][kind].int()] * self._spread(self._scales[number][kind], number)

    def put(self, kind: str, number: int, vector: Tensor, scales: Tensor | None) -> None:
        """See ``Moments``."""
        current = self._scales[number][kind]
        if scales is None or scales.shape != current.shape:
            padding = current.numel() * _BLOCK - vector.numel()
            scales = torch.nn.functional.pad(vector.abs(), (0, padding)).view(-1, _BLOCK).amax(1)
        current.copy_(scales)
        spread, values = self._spread(current, number), self._maps[kind]
        nearest = torch.bucketize(torch.where(spread > 0, vector / spread, 0.0), (values[1:] + values[:-1]) / 2)
        self._codes[number][kind].copy_(nearest)

    def scales(self) -> dict[str, Tensor]:
        """See ``Moments``."""
        return {f"{kind}/{number}": scales[kind] for number, scales in enumerate(self._scales) for kind in KINDS}

    def tensors(self) -> list[Tensor]:
        """See ``Moments``."""
        return [self._steps, *(tensor for table in (*self._codes, *self._scales) for tensor in table.values())]

    def _spread(self, scales: Tensor, number: int) -> Tensor:
        """float32 [n]: the scale of each element."""
        return scales.repeat_interleave(_BLOCK)[: self._flats[number].master.numel()]


MOMENTS: dict[str, type[FloatMoments] | type[EightBitMoments]] = {"adamw": FloatMoments, "adamw_8bit": EightBitMoments}
