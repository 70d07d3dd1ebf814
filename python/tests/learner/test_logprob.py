"""Logprobs and their gradient straight from hidden states, against torch's own."""

from __future__ import annotations

import pytest
import torch

from rollout_workers.learner.logprob import token_logprobs


@pytest.mark.parametrize("limit", [1 << 25, 40, 1], ids=["one chunk", "two rows a chunk", "one row a chunk"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_agrees_with_log_softmax(limit: int, bias: bool, temperature: float) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight, offset = (torch.randn(*s, generator=generator) for s in ((9, 6), (20, 6), (20,)))
    predictor = torch.randint(0, 9, (30,), generator=generator)  # several tokens of one predictor, some twice the same
    target = torch.randint(0, 3, (30,), generator=generator)
    upstream = torch.randn(30, generator=generator)

    def leaves() -> list[torch.Tensor]:
        return [t.clone().requires_grad_() for t in (hidden, weight, offset)]

    h, w, b = leaves()
    found, entropy = token_logprobs(h, w, b if bias else None, predictor, target, temperature=temperature, limit=limit)
    slope = torch.randn(9, generator=generator)
    ((found * upstream).sum() + (entropy * slope).sum()).backward()
    h2, w2, b2 = leaves()
    every = (torch.nn.functional.linear(h2, w2, b2 if bias else None) / temperature).log_softmax(-1)
    wanted = every[predictor, target]
    every_entropy = -(every.exp() * every).sum(-1)
    ((wanted * upstream).sum() + (every_entropy * slope).sum()).backward()

    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(entropy, every_entropy)
    torch.testing.assert_close(h.grad, h2.grad, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(w.grad, w2.grad, atol=1e-5, rtol=1e-5)
    if bias:
        torch.testing.assert_close(b.grad, b2.grad, atol=1e-5, rtol=1e-5)


def test_a_frozen_head_gets_no_gradient() -> None:
    hidden, weight = torch.randn(2, 3, requires_grad=True), torch.randn(5, 3)
    found, _ = token_logprobs(hidden, weight, None, torch.tensor([0, 1]), torch.tensor([4, 0]))
    found.sum().backward()
    assert hidden.grad is not None and weight.grad is None
