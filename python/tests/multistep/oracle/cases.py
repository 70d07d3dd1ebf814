"""Random inputs on which our multi-step worker and RLinf's are compared: from seeds, so both sides
make the same. Needs torch alone."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

CASES = 200
"""Inputs of each method."""
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
DTYPES = (*FLOATS, torch.int64, torch.int32, torch.uint8, torch.bool)


@dataclass(frozen=True)
class World:
    """rows: of a batch over all ranks."""

    rollout_ranks: int
    env_ranks: int
    rank: int
    rows: int
    mode: str


class Draw(random.Random):
    """Random parts of a case."""

    def tensor(self, *shape: int, dtypes: tuple[torch.dtype, ...] = DTYPES) -> Tensor:
        generator = torch.Generator().manual_seed(self.getrandbits(48))
        drawn = (torch.randn(shape, generator=generator) * 4).abs().to(self.choice(dtypes))
        if drawn.dim() > 1 and self.random() < 0.2:  # not contiguous
            drawn = drawn.transpose(0, 1).contiguous().transpose(0, 1)
        return drawn

    def bits(self, *shape: int, dtypes: tuple[torch.dtype, ...] = (torch.bool,)) -> Tensor:
        generator = torch.Generator().manual_seed(self.getrandbits(48))
        return (torch.rand(*shape, generator=generator) < self.choice((0.0, 0.3, 0.7))).to(self.choice(dtypes))

    def chance(self, probability: float) -> bool:
        return self.random() < probability


def world(draw: Draw) -> World:
    ours, theirs = draw.choice(((1, 1), (1, 3), (2, 1), (2, 3), (3, 2), (2, 4), (4, 6)))
    rows = draw.randint(1, 2) * int(np.lcm(ours, theirs))
    return World(ours, theirs, draw.randrange(ours), rows, draw.choice(("train", "eval")))


def env_batches(draw: Draw, sizes: list[int]) -> list[dict[str, Any]]:
    """What the mapped environment ranks send; some of it can't be merged."""
    chunk = draw.randint(1, 4)
    shapes = {
        key: tuple(draw.randint(1, 3) for _ in range(draw.randint(1, 3))) for key in ("states", "main_images", "wrist_images")
    }
    kinds = {key: (draw.choice(DTYPES),) for key in (*shapes, "rewards", "intervene_actions")}
    keys = [key for key in shapes if draw.chance(0.7)]
    named = draw.chance(0.5)
    stepped, rewarded, intervened = draw.chance(0.9), draw.chance(0.8), draw.chance(0.5)
    if not (keys or named):
        keys = ["states"]

    def observations(rows: int) -> dict[str, Any]:
        obs: dict[str, Any] = {key: draw.tensor(rows, *shapes[key], dtypes=kinds[key]) for key in keys}
        if named:
            obs["task_descriptions"] = [f"task {draw.randrange(9)}" for _ in range(rows)]
        if draw.chance(0.3):
            obs["extra_view_images"] = None
        return obs

    out: list[dict[str, Any]] = []
    for rows in sizes:
        flags = {key: draw.bits(rows, chunk) if stepped else None for key in ("dones", "terminations", "truncations")}
        sends = intervened and draw.chance(0.6)
        out.append(
            {
                "obs": observations(rows),
                "final_obs": observations(rows) if draw.chance(0.4) else None,
                **flags,
                "rewards": draw.tensor(rows, chunk, dtypes=kinds["rewards"]) if rewarded else None,
                "intervene_actions": draw.tensor(rows, chunk, 2, dtypes=kinds["intervene_actions"]) if sends else None,
                "intervene_flags": draw.bits(rows, chunk) if sends else None,
            }
        )
    extra = [("extra_view_images" in batch["obs"]) for batch in out]
    for batch in out:  # RLinf takes the keys of the first rank: the other ranks have the same
        for obs in (batch["obs"], batch["final_obs"]):
            if obs is not None:
                obs.pop("extra_view_images", None)
                if any(extra):
                    obs["extra_view_images"] = None
    broken = draw.choice(out)
    fault = draw.randrange(10)
    if fault == 0:
        broken["rewards"] = None
    elif fault == 1:
        broken["terminations"] = None
    elif fault == 2 and keys:
        broken["obs"][keys[-1]] = None
    elif fault == 3:
        broken["dones"] = draw.bits(broken["obs"][keys[0]].shape[0] + 1 if keys else 9, chunk)
    return out


class TinyPolicy(nn.Module):
    """A policy whose values are exact: a multiple of the states. head: the name of the attribute
    that shows values."""

    def __init__(self, head: str, columns: int, *, reports_values: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.columns, self.reports_values, self.dtype = columns, reports_values, dtype
        if head:
            setattr(self, head, nn.Identity())

    def predict_action_batch(self, env_obs: Mapping[str, Any], mode: str, **_: Any) -> tuple[Tensor, dict[str, Tensor]]:
        states = env_obs["states"].float()
        actions = states[:, None, :1].repeat(1, 2, 2)
        values = (states[:, :1] * 2 + torch.arange(self.columns)).to(self.dtype)
        return actions, {"prev_values": values} if self.reports_values else {}


@dataclass(frozen=True)
class Stepped:
    """An input of ``get_dones_and_rewards``."""

    batch: dict[str, Any]
    auto_reset: bool
    bootstrap_type: str
    gamma: float
    policy: TinyPolicy


def stepped(draw: Draw) -> Stepped:
    rows, chunk = draw.randint(1, 6), draw.randint(1, 4)
    terminations, truncations = draw.bits(rows, chunk), draw.bits(rows, chunk)
    dones = (terminations | truncations).to(draw.choice((torch.bool, torch.uint8, torch.int64, torch.float32)))
    final = {"states": draw.tensor(rows, 3, dtypes=FLOATS)}
    kinds = (*FLOATS, torch.int64) if draw.chance(0.6) else FLOATS
    return Stepped(
        batch={
            "obs": {"states": draw.tensor(rows, 3, dtypes=FLOATS)},
            "final_obs": None if draw.chance(0.15) else final,
            "dones": dones,
            "terminations": terminations,
            "truncations": truncations,
            "rewards": None if draw.chance(0.15) else draw.tensor(rows, chunk, dtypes=kinds),
        },
        auto_reset=draw.chance(0.75),
        bootstrap_type=draw.choice(("standard", "always")),
        gamma=draw.choice((0.0, 0.8, 0.99, 1.0)),
        policy=TinyPolicy(
            draw.choice(("value_head", "value_head", "q_head", "")),
            draw.choice((1, chunk)),
            reports_values=draw.chance(0.9),
            dtype=draw.choice((torch.float32, torch.float32, torch.bfloat16)),
        ),
    )


def chunk_actions(draw: Draw, rows: int) -> Tensor | np.ndarray[Any, Any]:
    """Actions of ``rows`` rows, or a few more or less."""
    rows += draw.choice((0, 0, 0, 0, 0, 1, -1))
    shape = (max(rows, 0), draw.randint(1, 4), *[draw.randint(1, 3)] * draw.randint(0, 1))
    if draw.chance(0.4):
        return draw.tensor(*shape, dtypes=(torch.float32, torch.float64, torch.int64)).numpy()
    actions = draw.tensor(*shape)
    return actions.requires_grad_() if actions.is_floating_point() and draw.chance(0.3) else actions


def module(draw: Draw) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Linear(draw.randint(1, 3), 2), nn.Tanh(), nn.Linear(2, draw.randint(1, 3))]
    if draw.chance(0.4):
        layers.append(nn.LayerNorm(2))
    made = nn.Sequential(*layers).to(draw.choice((torch.float32, torch.bfloat16)))
    return made.requires_grad_(False)


def actor_weights(draw: Draw, policy: nn.Module) -> dict[str, Tensor]:
    """Weights of a policy; those of some cases lack a name, have one too many, or another shape."""
    found = {
        name: draw.tensor(*tensor.shape, dtypes=(torch.float32, torch.bfloat16)) for name, tensor in policy.state_dict().items()
    }
    name, fault = draw.choice(sorted(found)), draw.randrange(8)
    if fault == 0:
        del found[name]
    elif fault == 1:
        found["other.weight"] = draw.tensor(2, 2)
    elif fault == 2:
        found[name] = draw.tensor(5, 5, 5)
    return found


def described(value: Any) -> Any:
    """A value as dtype, shape and digest of its bytes, in a form that JSON has."""
    if isinstance(value, Mapping):
        return {str(key): described(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return f"array {value.dtype}{list(value.shape)} {_digest(np.ascontiguousarray(value).tobytes())}"
    if isinstance(value, Tensor):
        raw = value.detach().contiguous().reshape(-1).view(torch.uint8) if value.numel() else value
        grad = " grad" if value.requires_grad else ""
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)} {_digest(bytes(raw.tolist()))}{grad}"
    return value if value is None or isinstance(value, (int, str)) else [described(item) for item in value]


def _digest(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()[:12]
