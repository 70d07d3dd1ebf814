"""How likely the tokens of a prompt are: one plain pass over the model, beside the decoding loop."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from rollout_workers.engines.base import ContextOverflow, EngineError, InvalidPrompt, Logprobs

_ROWS = 512  # of logits that are normalised at a time, in f32


class Scoring:
    """Prompts that wait to be scored. Used by the decoding thread alone; answers may be cancelled from anywhere.

    Each prompt runs alone and unpadded, so that no neighbour changes its bits. Its logits [T, V] are held at once, in the model's
    own dtype.
    """

    def __init__(self, module: PreTrainedModel, max_len: int, vocabulary: int) -> None:
        self._module, self._max_len, self._vocabulary = module, max_len, vocabulary
        self._waiting: deque[tuple[NDArray[np.int64], Future[Logprobs]]] = deque()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, prompt: NDArray[np.int64], answer: Future[Logprobs]) -> None:
        """Queue a prompt [T]. Raises ``InvalidPrompt``, ``ContextOverflow``."""
        if prompt.ndim != 1 or not len(prompt):
            raise InvalidPrompt("a prompt to score needs at least one token id in one dimension")
        if len(prompt) > self._max_len:
            raise ContextOverflow("of a prompt to score", len(prompt), self._max_len)
        if prompt.min() < 0 or prompt.max() >= self._vocabulary:
            raise InvalidPrompt(f"a prompt to score holds token ids outside the vocabulary of {self._vocabulary}")
        self._waiting.append((prompt, answer))

    def one(self) -> None:
        """Score the prompt that has waited longest. Where that raises, so does its answer, and nothing else."""
        prompt, answer = self._waiting.popleft()
        if not answer.set_running_or_notify_cancel():  # who asked has gone
            return
        try:
            answer.set_result(logprobs_of(self._module, prompt))
        except Exception as error:
            answer.set_exception(error)

    def end(self, error: EngineError) -> None:
        """Answer all that wait with an error."""
        while self._waiting:
            _, answer = self._waiting.popleft()
            if answer.set_running_or_notify_cancel():
                answer.set_exception(error)


@torch.inference_mode()
def logprobs_of(module: PreTrainedModel, prompt: NDArray[np.int64]) -> Logprobs:
    """f32[T]: the logprob of each token of int64[T] given those before it; 0 for the first."""
    ids = torch.from_numpy(prompt).to(next(module.parameters()).device)
    logits = module(input_ids=ids[None], use_cache=False).logits[0]
    found = np.zeros(len(prompt), np.float32)
    for start in range(0, len(prompt) - 1, _ROWS):
        rows = logits[start : min(start + _ROWS, len(prompt) - 1)].float()
        wanted = ids[start + 1 : start + 1 + len(rows), None]
        found[start + 1 : start + 1 + len(rows)] = rows.log_softmax(-1).gather(-1, wanted)[:, 0].cpu().numpy()
    return found
