"""A digest of tensors that exist one at a time."""

from __future__ import annotations

import pytest
import torch

from rollout_workers.weights import streamed_digest, weights_digest


def test_a_streamed_digest_is_that_of_all_tensors() -> None:
    large, narrow = torch.arange(6_000_000.0).view(600, 10_000), torch.ones(3, dtype=torch.bfloat16)
    tensors = [("b", large), ("a", narrow), ("c", torch.zeros(0, 4))]
    digest, layout = streamed_digest(iter(tensors))
    assert digest == weights_digest(tensors)
    assert {name: (t.dtype, t.shape, t.device.type) for name, t in layout.items()} == {
        name: (t.dtype, t.shape, "meta") for name, t in tensors
    }
    with pytest.raises(ValueError, match="name a"):
        streamed_digest([("a", torch.zeros(1)), ("a", torch.zeros(1))])
