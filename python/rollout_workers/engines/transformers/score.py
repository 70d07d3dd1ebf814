"""The log-probabilities of a prompt's tokens: one plain pass through the model, outside of the
decoding loop."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from rollout_workers.engines.base import PromptLogprobs, TopLogprobs
from rollout_workers.engines.errors import ContextOverflow, EngineError, InvalidPrompt
from rollout_workers.weights.head import plain_head

log = logging.getLogger(__name__)

HELD = 1 << 24
"""The maximum number of logits in memory, in elements. With as many log-probabilities, in f32, that
is 128 MB."""


class Scoring:
    """Prompts that wait to be scored. Only the decoding thread uses it; answers may be cancelled in
    any thread.

    Each prompt runs alone and without padding, so that its bits do not depend on others. Logits are
    computed for a few rows of the last hidden states [T, H] at a time. If the head of the model is
    not linear, all logits [T, V] are in memory at once.
    """

    def __init__(self, module: PreTrainedModel, max_len: int, vocabulary: int) -> None:
        self._module, self._max_len, self._vocabulary = module, max_len, vocabulary
        self._linear = linear_head(module)
        if not self._linear:
            log.info("%s computes its own logits, so all logits of a scored prompt are in memory at once", type(module).__name__)
        self._waiting: deque[tuple[NDArray[np.int64], int, Future[PromptLogprobs]]] = deque()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, prompt: NDArray[np.int64], top: int, answer: Future[PromptLogprobs]) -> None:
        """Queue a prompt [T], with ``top`` alternatives per token. Raises ``InvalidPrompt``,
        ``ContextOverflow``."""
        if prompt.ndim != 1 or not len(prompt):
            raise InvalidPrompt("the prompt to score must be one-dimensional with at least one token id")
        if len(prompt) > self._max_len:
            raise ContextOverflow("of a prompt to score", len(prompt), self._max_len)
        if prompt.min() < 0 or prompt.max() >= self._vocabulary:
            raise InvalidPrompt(f"the prompt to score has token ids outside the vocabulary of {self._vocabulary}")
        self._waiting.append((prompt, min(top, self._vocabulary), answer))

    def one(self) -> None:
        """Score the prompt that has waited longest. An exception becomes the answer of this prompt
        only."""
        prompt, top, answer = self._waiting.popleft()
        if not answer.set_running_or_notify_cancel():  # the caller has cancelled
            return
        try:
            answer.set_result(logprobs_of(self._module, prompt, top, linear=self._linear))
        except Exception as error:
            answer.set_exception(error)

    def end(self, error: EngineError) -> None:
        """Answer all waiting prompts with an error."""
        while self._waiting:
            *_, answer = self._waiting.popleft()
            if answer.set_running_or_notify_cancel():
                answer.set_exception(error)


@torch.inference_mode()
def logprobs_of(
    module: PreTrainedModel, prompt: NDArray[np.int64], top: int = 0, *, linear: bool, held: int = HELD
) -> PromptLogprobs:
    """The logprob of each token of int64[T] given the tokens before it, and the ``top`` most likely
    tokens. linear: see :func:`linear_head`."""
    ids = torch.from_numpy(prompt).to(next(module.parameters()).device)
    rows, head = _rows_of(module, ids[None], linear)
    step = max(1, held // module.config.get_text_config().vocab_size)
    found = np.zeros(len(prompt), np.float32)
    best = TopLogprobs(np.full((len(prompt), top), -1, np.int32), np.zeros((len(prompt), top), np.float32))
    for start in range(0, len(prompt) - 1, step):
        logits = head(rows[0, start : min(start + step, len(prompt) - 1)]).float()
        part = np.s_[start + 1 : start + 1 + len(logits)]
        logprobs = logits.log_softmax(-1)
        found[part] = logprobs.gather(-1, ids[part, None])[:, 0].cpu().numpy()
        if top:
            values, tokens = logprobs.topk(top, dim=-1)
            best.logprobs[part], best.token_ids[part] = values.cpu().numpy(), tokens.cpu().numpy()
    return PromptLogprobs(found, best if top else None)


def _rows_of(module: PreTrainedModel, ids: Tensor, linear: bool) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """ids int64[1, T] -> [1, T, H] and the function that computes logits of its rows; without a
    linear head, logits [1, T, V] and None."""
    if not linear:
        return module(input_ids=ids, use_cache=False).logits, lambda logits: logits
    head: Any = module.get_output_embeddings()
    return module.base_model(input_ids=ids, use_cache=False).last_hidden_state, head


@torch.inference_mode()
def linear_head(module: PreTrainedModel) -> bool:
    """Whether the model's logits are the output embedding applied to its last hidden states
    (``plain_head``), also if these are computed separately. Tested with eight tokens."""
    if not plain_head(module):
        return False
    vocabulary = module.config.get_text_config().vocab_size
    ids = torch.arange(8, device=next(module.parameters()).device).mul_(7919).remainder_(vocabulary)[None]
    try:
        rows, head = _rows_of(module, ids, linear=True)
        found = head(rows).float()
    except torch.OutOfMemoryError:
        raise
    except (TypeError, ValueError, RuntimeError, AttributeError):
        return False
    wanted = module(input_ids=ids, use_cache=False).logits.float()
    limit = 64 * torch.finfo(rows.dtype).eps ** 0.75 * wanted.abs().max().clamp(min=1e-6)
    return found.shape == wanted.shape and bool(((found - wanted).abs().max() <= limit).item())
