"""A reward model in training: the trunk of a causal model with a scalar head."""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification
from transformers.utils import logging as transformers_logging

from rollout_workers.trainer.distributed.ranks import ALONE, Ranks
from rollout_workers.trainer.model.policy import TOLERANCE, Policy, attends_everywhere, call_packed, probe_samples
from rollout_workers.trainer.model.tree_attention import install
from rollout_workers.trainer.packing import MicroBatch, pack
from rollout_workers.trainer.types import BadSettings
from rollout_workers.weights.pretrained import load_whole


class Scorer(Policy):
    """A Hugging Face sequence classifier with one label. A causal model gets a new head, always the
    same one."""

    def _probe(self, ranks: Ranks) -> None:
        self.share_prefixes = attends_everywhere(self.model.config) and install(
            self.model, lambda: all(ranks.exchange(self._scores_agree()))
        )

    @classmethod
    def load(
        cls,
        directory: str | os.PathLike[str],
        *,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device | None = None,
        ranks: Ranks = ALONE,
    ) -> Scorer:
        """Load a folder in the Hugging Face layout. Raises ``BadSettings`` for an architecture
        without a classifier."""
        transformers_logging.disable_progress_bar()
        level = transformers_logging.get_verbosity()
        transformers_logging.set_verbosity_error()  # it warns that the head is new
        try:
            with torch.random.fork_rng():
                torch.manual_seed(0)
                model: Any = load_whole(
                    AutoModelForSequenceClassification, directory, new=["score.weight"], dtype=dtype, num_labels=1
                )
        except ValueError as error:
            raise BadSettings(f"{directory} cannot be a reward model: {error}") from error
        finally:
            transformers_logging.set_verbosity(level)
        if not isinstance(getattr(model, "score", None), torch.nn.Linear):
            raise BadSettings(
                f"{type(model).__name__} has no linear `score` head; reward models are trained from decoders that have one"
            )
        return cls(model.to(device or ranks.loading_device), ranks)

    def config_folder(self, model_dir: Path) -> Path:
        """A copy of the model's config and tokenizer whose config names the classifier. It is
        removed with this object."""
        folder = Path(tempfile.mkdtemp(prefix="rollout-config-"))
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        for path in model_dir.iterdir():
            if path.is_file() and path.suffix in (".json", ".jinja", ".model", ".txt") and not path.name.endswith(".index.json"):
                shutil.copyfile(path, folder / path.name)
        self.model.config.architectures = [type(self.model).__name__]
        self.model.config.save_pretrained(folder)
        return folder

    def scores(self, batch: MicroBatch) -> Tensor:
        """float32 [N], with gradient: the score at the position that predicts each trained
        token."""
        return self._inside(self._scores, batch)

    def _scores(self, batch: MicroBatch) -> Tensor:
        model: Any = self.model
        states = call_packed(model.base_model, batch, device=model.device, dtype=model.dtype).last_hidden_state.flatten(0, 1)
        places = torch.from_numpy(batch.predictors[batch.predictor]).to(model.device)
        return model.score(states.index_select(0, places)).float()[:, 0]

    @torch.no_grad()
    def _scores_agree(self) -> bool:
        samples = probe_samples(self.model.config.get_text_config().vocab_size)
        found = []
        for share in (True, False):
            (batch,) = pack(samples, range(len(samples)), tokens=1 << 20, share_prefixes=share)
            try:
                scores = self.scores(batch).cpu()
            except (TypeError, ValueError, RuntimeError, AttributeError):
                return False
            table = torch.zeros(len(samples), len(samples[0].token_ids))
            table[batch.sample, batch.place] = scores
            found.append(table)
        return bool((found[0] - found[1]).abs().max() < TOLERANCE[self.model.dtype])
