"""Log-probabilities of chosen tokens straight from hidden states, without keeping the logits of a whole batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# Logits held at a time, in elements. More predictors than fit are worked off in chunks, whose logits the backward pass
# computes again.
LOGITS_LIMIT = 1 << 25


class TokenLogprob(torch.autograd.Function):
    """``log softmax(hidden @ weight.T / temperature)`` at chosen tokens, and the entropy of each distribution.

    hidden: [M, H]. weight: [V, H], same dtype. bias: [V] or None. predictor: int64 [N], row of hidden for each token.
    target: int64 [N], the token. temperature: > 0; what the tokens were sampled with, so that the policy that is trained
    is the policy that sampled. Returns float32 [N] logprobs and float32 [M] entropies in nats, of the distribution at that
    temperature; both have a gradient, and neither costs anything where it is not used.
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
        step = max(1, limit // weight.shape[0])
        logprobs = hidden.new_empty(predictor.shape, dtype=torch.float32)
        entropy = hidden.new_empty(hidden.shape[:1], dtype=torch.float32)
        normalizers = torch.empty_like(entropy)
        probabilities: Tensor | None = None
        for start in range(0, hidden.shape[0], step):
            rows = slice(start, start + step)
            logits = _logits(hidden[rows], weight, bias, temperature)
            normalizer = logits.logsumexp(-1)
            chosen = _tokens_of(predictor, start, step, hidden.shape[0])
            local = predictor[chosen] - start
            logprobs[chosen] = logits[local, target[chosen]] - normalizer[local]
            probabilities = (logits - normalizer[:, None]).exp_()
            entropy[rows] = normalizer - torch.einsum("mv,mv->m", probabilities, logits)
            normalizers[rows] = normalizer
        kept = probabilities if step >= hidden.shape[0] else None
        ctx.save_for_backward(hidden, weight, bias, predictor, target, normalizers, kept)
        ctx.temperature, ctx.step = temperature, step
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad: Any, grad_entropy: Any) -> tuple[Tensor | None, ...]:
        """d logprob / d logits = onehot - softmax, summed over the tokens of each predictor; d entropy / d logits = -p (log p
        + entropy)."""
        hidden, weight, bias, predictor, target, normalizers, kept = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        grad_bias = torch.zeros_like(bias) if bias is not None and ctx.needs_input_grad[2] else None
        grad = normalizers.new_zeros(target.shape) if grad is None else grad
        weights = normalizers.new_zeros(hidden.shape[0]).index_add_(0, predictor, grad)
        for start in range(0, hidden.shape[0], ctx.step):
            rows = slice(start, start + ctx.step)
            if kept is not None and grad_entropy is None:
                grad_logits = kept * -weights[:, None]
            else:
                logits = _logits(hidden[rows], weight, bias, ctx.temperature)
                log_probabilities = logits.sub_(normalizers[rows, None])
                probabilities = log_probabilities.exp()
                grad_logits = probabilities * -weights[rows, None]
                if grad_entropy is not None:
                    entropy = -(probabilities * log_probabilities).sum(-1, keepdim=True)
                    grad_logits -= grad_entropy[rows, None] * probabilities * (log_probabilities + entropy)
            chosen = _tokens_of(predictor, start, ctx.step, hidden.shape[0])
            grad_logits.index_put_((predictor[chosen] - start, target[chosen]), grad[chosen], accumulate=True)
            grad_logits = grad_logits.div_(ctx.temperature).to(hidden.dtype)
            grad_hidden[rows] = grad_logits @ weight
            if grad_weight is not None:
                grad_weight.addmm_(grad_logits.T, hidden[rows])
            if grad_bias is not None:
                grad_bias += grad_logits.sum(0)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    predictor: Tensor,
    target: Tensor,
    *,
    temperature: float = 1.0,
    limit: int = LOGITS_LIMIT,
) -> tuple[Tensor, Tensor]:
    """``TokenLogprob`` by keyword: (float32 [N] logprobs, float32 [M] entropies)."""
    return TokenLogprob.apply(hidden, weight, bias, predictor, target, temperature, limit)  # type: ignore[no-any-return]


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    """float32 [m, V]."""
    logits = torch.nn.functional.linear(hidden, weight, bias).float()
    return logits if temperature == 1.0 else logits / temperature


def _tokens_of(predictor: Tensor, start: int, step: int, total: int) -> Tensor | slice:
    """The tokens whose predictor lies in a chunk: all of them where there is one chunk."""
    if step >= total:
        return slice(None)
    return ((predictor >= start) & (predictor < start + step)).nonzero()[:, 0]
