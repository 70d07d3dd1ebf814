"""Logprobs of given tokens from hidden states or logits, without the float32 logits of a whole
batch in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

# The maximum number of logits in memory. More predictors are processed in chunks, whose logits the
# backward pass computes again.
LOGITS_LIMIT = 1 << 25


class TokenLogprob(torch.autograd.Function):
    """``log softmax(hidden @ weight.T / temperature)`` of given tokens, and the entropy of each
    distribution.

    hidden: [M, H]. weight: [V, H], same dtype. bias: [V] or None. predictor: int64 [N], the row of
    hidden for each token. target: int64 [N], the token. temperature: > 0, the one that the tokens
    were sampled with. Returns float32 [N] logprobs and float32 [M] entropies in nats at that
    temperature. Both have a gradient, which costs nothing if it is not used.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        predictor: Tensor,
        target: Tensor,
        temperature: float,
        limit: int,
    ) -> tuple[Tensor, Tensor]:
        """See the class."""
        chunks = _Chunks(hidden.shape[0], max(1, limit // weight.shape[0]), predictor, target, temperature)
        logprobs, entropy, normalizers, kept = chunks.forward(lambda rows: linear(hidden[rows], weight, bias))
        ctx.save_for_backward(hidden, weight, bias, predictor, target, normalizers, kept)
        ctx.temperature, ctx.step = temperature, chunks.step
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad: Any, grad_entropy: Any) -> tuple[Tensor | None, ...]:
        """See ``_Chunks.backward``."""
        hidden, weight, bias, predictor, target, normalizers, kept = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        chunks = _Chunks(hidden.shape[0], ctx.step, predictor, target, ctx.temperature)
        # Sums over many chunks in bfloat16 would lose small terms.
        kind = hidden.dtype if ctx.step >= hidden.shape[0] else torch.promote_types(hidden.dtype, torch.float32)
        grad_weight = torch.zeros_like(weight, dtype=kind) if ctx.needs_input_grad[1] else None
        grad_bias = torch.zeros_like(bias, dtype=kind) if bias is not None and ctx.needs_input_grad[2] else None
        logits_of = lambda rows: linear(hidden[rows], weight, bias)  # noqa: E731
        for rows, grad_logits in chunks.backward(logits_of, normalizers, kept, grad, grad_entropy):
            grad_logits = grad_logits.to(hidden.dtype)
            grad_hidden[rows] = grad_logits @ weight
            if grad_weight is not None and kind == hidden.dtype:
                grad_weight.addmm_(grad_logits.T, hidden[rows])
            elif grad_weight is not None:
                grad_weight += grad_logits.T @ hidden[rows]
            if grad_bias is not None:
                grad_bias += grad_logits.sum(0)
        grad_weight, grad_bias = (each if each is None else each.to(hidden.dtype) for each in (grad_weight, grad_bias))
        return grad_hidden, grad_weight, grad_bias, None, None, None, None


class LogitLogprob(torch.autograd.Function):
    """Like ``TokenLogprob``, for models whose logits are not just a product with the head.

    logits: [P, V], of any float dtype. predictors: int64 [M], the predicting rows without
    duplicates.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, predictors: Tensor, predictor: Tensor, target: Tensor, temperature: float, limit: int
    ) -> tuple[Tensor, Tensor]:
        """See the class."""
        chunks = _Chunks(predictors.shape[0], max(1, limit // logits.shape[1]), predictor, target, temperature)
        logprobs, entropy, normalizers, kept = chunks.forward(lambda rows: logits[predictors[rows]])
        ctx.save_for_backward(logits, predictors, predictor, target, normalizers, kept)
        ctx.temperature, ctx.step = temperature, chunks.step
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad: Any, grad_entropy: Any) -> tuple[Tensor | None, ...]:
        """See ``_Chunks.backward``."""
        logits, predictors, predictor, target, normalizers, kept = ctx.saved_tensors
        chunks, every = _Chunks(predictors.shape[0], ctx.step, predictor, target, ctx.temperature), torch.zeros_like(logits)
        for rows, part in chunks.backward(lambda rows: logits[predictors[rows]], normalizers, kept, grad, grad_entropy):
            every[predictors[rows]] = part.to(logits.dtype)
        return every, None, None, None, None, None


@dataclass(frozen=True, slots=True)
class _Chunks:
    """M predicting rows in chunks of ``step``. The logits of a chunk, [m, V], are computed once for
    each pass."""

    count: int
    step: int
    predictor: Tensor
    target: Tensor
    temperature: float

    def forward(self, logits_of: Callable[[slice], Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """float32: logprobs [N], entropies [M], normalizers [M], and the probabilities [M, V] if
        there is only one chunk."""
        logprobs = self.predictor.new_empty(self.predictor.shape, dtype=torch.float32)
        entropy = self.predictor.new_empty(self.count, dtype=torch.float32)
        normalizers = torch.empty_like(entropy)
        probabilities: Tensor | None = None
        for rows in self._rows():
            logits = self._scaled(logits_of(rows))
            normalizer = logits.logsumexp(-1)
            chosen = self._tokens_of(rows)
            local = self.predictor[chosen] - rows.start
            logprobs[chosen] = logits[local, self.target[chosen]] - normalizer[local]
            probabilities = (logits - normalizer[:, None]).exp_()
            entropy[rows] = normalizer - torch.einsum("mv,mv->m", probabilities, logits)
            normalizers[rows] = normalizer
        return logprobs, entropy, normalizers, probabilities if self.step >= self.count else None

    def backward(
        self,
        logits_of: Callable[[slice], Tensor],
        normalizers: Tensor,
        kept: Tensor | None,
        grad: Tensor | None,
        grad_entropy: Tensor | None,
    ) -> Iterator[tuple[slice, Tensor]]:
        """float32 [m, V] of each chunk: the gradient of the logits.

        d logprob / d logits = onehot - softmax, summed over the tokens of each predictor; d entropy
        / d logits = -p (log p + entropy).
        """
        grad = normalizers.new_zeros(self.target.shape) if grad is None else grad
        weights = normalizers.new_zeros(self.count).index_add_(0, self.predictor, grad)
        for rows in self._rows():
            if kept is not None and grad_entropy is None:
                grad_logits = kept * -weights[:, None]
            else:
                log_probabilities = self._scaled(logits_of(rows)).sub_(normalizers[rows, None])
                probabilities = log_probabilities.exp()
                grad_logits = probabilities * -weights[rows, None]
                if grad_entropy is not None:
                    entropy = -(probabilities * log_probabilities).sum(-1, keepdim=True)
                    grad_logits -= grad_entropy[rows, None] * probabilities * (log_probabilities + entropy)
            chosen = self._tokens_of(rows)
            places = (self.predictor[chosen] - rows.start, self.target[chosen])
            grad_logits.index_put_(places, grad[chosen], accumulate=True)
            yield rows, grad_logits.div_(self.temperature)

    def _rows(self) -> Iterator[slice]:
        return (slice(start, start + self.step) for start in range(0, self.count, self.step))

    def _tokens_of(self, rows: slice) -> Tensor | slice:
        """The tokens whose predictor is in a chunk."""
        if self.step >= self.count:
            return slice(None)
        return ((self.predictor >= rows.start) & (self.predictor < rows.stop)).nonzero()[:, 0]

    def _scaled(self, logits: Tensor) -> Tensor:
        """float32 [m, V]; may be changed in place, because ``logits_of`` always returns a new
        tensor."""
        logits = logits.float()
        return logits if self.temperature == 1.0 else logits / self.temperature


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    predictor: Tensor,
    target: Tensor,
    *,
    temperature: float = 1.0,
    limit: int | None = None,
) -> tuple[Tensor, Tensor]:
    """``TokenLogprob`` by keyword. limit: None is ``LOGITS_LIMIT``.

    hidden: float [M, H]. weight: float [V, H]. bias: float [V]. predictor, target: int64 [N].
    Returns float32 [N] logprobs and float32 [M] entropies.
    """
    limit = LOGITS_LIMIT if limit is None else limit
    return TokenLogprob.apply(hidden, weight, bias, predictor, target, temperature, limit)  # type: ignore[no-any-return]


def logit_logprobs(
    logits: Tensor, predictors: Tensor, predictor: Tensor, target: Tensor, *, temperature: float = 1.0, limit: int | None = None
) -> tuple[Tensor, Tensor]:
    """``LogitLogprob`` by keyword, as ``token_logprobs``.

    logits: float [P, V]. predictors: int64 [M]. predictor, target: int64 [N]. Returns float32 [N]
    logprobs and float32 [M] entropies.
    """
    limit = LOGITS_LIMIT if limit is None else limit
    return LogitLogprob.apply(logits, predictors, predictor, target, temperature, limit)  # type: ignore[no-any-return]


def top_logprobs(
    logits_of: Callable[[slice], Tensor], count: int, k: int, *, temperature: float = 1.0, step: int
) -> tuple[Tensor, Tensor]:
    """The k most likely tokens of ``count`` rows of logits and their logprobs, without gradient.

    logits_of: rows -> float [m, V]. step: the rows of a chunk. Returns int64 [M, K] ids, float32
    [M, K] logprobs.
    """
    ids, found = [], []
    for start in range(0, count, step):
        logits = logits_of(slice(start, start + step)).float() / temperature
        values, places = logits.topk(min(k, logits.shape[-1]), dim=-1)
        ids.append(places)
        found.append(values - logits.logsumexp(-1, keepdim=True))
    return torch.cat(ids), torch.cat(found)
