"""Ask the oracles: ``python -m oracle.record [--check]``, in the environment that
``make check-oracles`` builds.

Writes what they answer to ``golden.safetensors``, from which ``make test`` compares without them;
with ``--check`` says where they answer something else than is written there.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from . import trl_oracle, verl_oracle
from .batches import CASES, batch

GOLDEN = Path(__file__).parent / "golden.safetensors"


def answers() -> dict[str, Tensor]:
    """``<oracle>/<what>@<case>`` with ``#loss``, ``#gradient`` or ``#estimate``."""
    found: dict[str, Tensor] = {"verl/controller@any#estimate": verl_oracle.controller()}
    for case in CASES:
        for name, losses in (("trl", trl_oracle.LOSSES), ("verl", verl_oracle.LOSSES)):
            for what, ask in losses.items():
                loss, gradient = ask(batch(case))
                found[f"{name}/{what}@{case}#loss"] = loss.float()
                found[f"{name}/{what}@{case}#gradient"] = gradient
        for what, estimate in verl_oracle.estimates(batch(case)).items():
            found[f"verl/{what}@{case}#estimate"] = estimate
    return {name: tensor.contiguous() for name, tensor in found.items()}


def main() -> None:
    torch.set_num_threads(1)
    found = answers()
    if "--check" not in sys.argv:
        save_file(found, GOLDEN)
        print(f"wrote {len(found)} answers to {GOLDEN.name}")
        return
    golden = load_file(GOLDEN)
    wrong = sorted(set(found) ^ set(golden))
    both = sorted(set(found) & set(golden))
    wrong += [name for name in both if not torch.allclose(found[name], golden[name], 1e-6, 1e-6, True)]
    for name in wrong:
        print(f"not as written: {name}")
    print(f"{len(found)} answers of the oracles, {len(wrong)} not as written")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
