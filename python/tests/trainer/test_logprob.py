"""Logprobs and their gradient, in chunks, from hidden states and from logits, against torch's
own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from rollout_workers.trainer.model import logprob
from rollout_workers.trainer.model.logprob import logit_logprobs, token_logprobs
from rollout_workers.trainer.model.policy import Policy
from rollout_workers.trainer.packing import pack

from .addition import sampled_batch


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


def test_many_chunks_of_bfloat16_are_as_near_the_gradient_as_one() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (torch.randn(*s, generator=generator).bfloat16() for s in ((2048, 16), (12, 16), (12,)))
    predictor, target = torch.arange(2048), torch.randint(0, 12, (2048,), generator=generator)

    def gradients(kind: torch.dtype, limit: int) -> list[torch.Tensor]:
        leaves = [t.to(kind, copy=True).requires_grad_() for t in (weight, bias)]
        token_logprobs(hidden.to(kind), *leaves, predictor, target, limit=limit)[0].sum().backward()
        assert all(t.grad is not None and t.grad.dtype == kind for t in leaves)
        return [t.grad.float() for t in leaves if t.grad is not None]

    for wanted, one, many in zip(
        *(gradients(*c) for c in ((torch.float32, 1 << 25), (torch.bfloat16, 1 << 25), (torch.bfloat16, 24))), strict=True
    ):
        assert (many - wanted).norm() < 1.5 * (one - wanted).norm()


def test_a_frozen_head_gets_no_gradient() -> None:
    hidden, weight = torch.randn(2, 3, requires_grad=True), torch.randn(5, 3)
    found, _ = token_logprobs(hidden, weight, None, torch.tensor([0, 1]), torch.tensor([4, 0]))
    found.sum().backward()
    assert hidden.grad is not None and weight.grad is None


@pytest.mark.parametrize("limit", [None, 40, 1], ids=["one chunk", "two rows a chunk", "one row a chunk"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_given_logits_agree_with_log_softmax(limit: int | None, temperature: float) -> None:
    generator = torch.Generator().manual_seed(0)
    given = torch.randn(12, 20, generator=generator)
    predictors = torch.tensor([0, 1, 2, 4, 5, 7, 8, 10, 11])
    predictor = torch.randint(0, 9, (30,), generator=generator)
    target = torch.randint(0, 3, (30,), generator=generator)
    upstream, slope = torch.randn(30, generator=generator), torch.randn(9, generator=generator)
    ours, plain = (given.clone().requires_grad_() for _ in range(2))
    found, entropy = logit_logprobs(ours, predictors, predictor, target, temperature=temperature, limit=limit)
    ((found * upstream).sum() + (entropy * slope).sum()).backward()
    every = (plain[predictors] / temperature).log_softmax(-1)
    every_entropy = -(every.exp() * every).sum(-1)
    ((every[predictor, target] * upstream).sum() + (every_entropy * slope).sum()).backward()
    torch.testing.assert_close(found, every[predictor, target])
    torch.testing.assert_close(entropy, every_entropy)
    torch.testing.assert_close(ours.grad, plain.grad, atol=1e-5, rtol=1e-5)


class Largest(TorchDispatchMode):
    """Observes every new tensor, and records the largest number of float32 rows over the
    vocabulary."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.vocabulary, self.rows = vocabulary, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, (list, tuple)) else [made]:
            if isinstance(tensor, torch.Tensor) and tensor.dtype == torch.float32 and tensor.shape[-1:] == (self.vocabulary,):
                self.rows = max(self.rows, tensor.numel() // self.vocabulary)
        return made


SIZES: dict[str, Any] = {
    "vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "from hidden states": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "from capped logits": lambda: Gemma2ForCausalLM(Gemma2Config(**SIZES, head_dim=8, final_logit_softcapping=0.1)),
}


@pytest.mark.parametrize("name", MODELS)
def test_at_most_the_limit_of_logit_rows_exists_at_a_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks forward and backward. The model is in bfloat16, so only our code creates float32
    logits."""
    torch.manual_seed(0)
    model = MODELS[name]()
    torch.nn.init.normal_(model.get_parameter("model.embed_tokens.weight"), std=0.5)
    torch.nn.init.normal_(model.get_parameter("lm_head.weight"), std=0.5)  # logits that a cap changes
    policy = Policy(model.bfloat16())
    assert policy.linear_head == (name == "from hidden states")
    samples = sampled_batch(1)
    (batch,) = pack(samples, range(len(samples)), tokens=1 << 16, share_prefixes=policy.share_prefixes)

    def run() -> tuple[int, list[torch.Tensor]]:
        policy.model.zero_grad()
        with Largest(60) as seen:
            found = policy.logprobs(batch, temperature=0.8)
            (found.tokens.sum() + found.entropy.sum()).backward()
        slopes = [p.grad.clone() for p in policy.model.parameters() if p.grad is not None]
        return seen.rows, [found.tokens.detach(), found.entropy.detach(), *slopes]

    whole, wanted = run()
    assert whole == len(batch.predictors) > 8  # one chunk, which exceeds the limit and which the observer detects
    monkeypatch.setattr(logprob, "LOGITS_LIMIT", 4 * 60)
    rows, found = run()
    assert rows == 4
    for one, other in zip(found, wanted, strict=True):
        assert (one - other).norm() <= 0.02 * other.norm()
