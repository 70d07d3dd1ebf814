"""The files that stand beside the tensors of a published model."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from pathlib import Path

from rollout_workers.trainer.model.policy import Policy
from rollout_workers.trainer.model.scorer import Scorer


def companions_of(policy: Policy, model_dir: Path) -> Path:
    """The folder whose config and tokenizer fit the policy's tensors: the model's own, or for a reward model, whose config says
    that it is a classifier, a copy that lives as long as the policy."""
    if not isinstance(policy, Scorer):
        return model_dir
    folder = Path(tempfile.mkdtemp(prefix="rollout-config-"))
    weakref.finalize(policy, shutil.rmtree, folder, ignore_errors=True)
    for path in model_dir.iterdir():
        if path.is_file() and path.suffix in (".json", ".jinja", ".model", ".txt") and not path.name.endswith(".index.json"):
            shutil.copyfile(path, folder / path.name)
    policy.model.config.architectures = [type(policy.model).__name__]
    policy.model.config.save_pretrained(folder)
    return folder
