"""Deterministic mode: the bits of a request and a seed do not depend on other requests, slots, or
earlier work."""

import pytest
import torch

from rollout_workers.engines.errors import ModelUnsupported
from rollout_workers.engines.transformers.llama import LlamaForward
from rollout_workers.engines.transformers.slots import SlotTable

from .tiny import outputs, request, running, same_bits

PROBES = [
    request("plain", length=5, seeds=(11, 12, 13), max_tokens=12),
    request("hot", length=17, seeds=(11,), temperature=1.3, max_tokens=20),
    request("cut", length=3, seeds=(5, 6), top_k=20, top_p=0.9, min_p=0.01, temperature=0.9, max_tokens=9),
    request("greedy", length=30, temperature=0, max_tokens=15),
    request("penalized", length=12, seeds=(5, 6), max_tokens=14, repetition_penalty=1.3, frequency_penalty=0.5, top_logprobs=3),
    request("biased", length=6, max_tokens=11, logit_bias=((7, 3.0), (9, -5.0)), min_tokens=4, stop_token_ids=(7,)),
]


def neighbours(salt: int):
    """Requests with other shapes and parameters."""
    return [
        request(
            f"n{salt}-{i}",
            length=1 + (7 * i + salt) % 40,
            seeds=range(i % 4 + 1),
            max_tokens=1 + (5 * i) % 17,
            temperature=0.5 + i % 3,
            top_k=3 * (i % 2),
        )
        for i in range(12)
    ]


@pytest.mark.parametrize(("threads", "block"), [(1, 7), (2, 7), (2, 4)])
async def test_bits_do_not_depend_on_other_requests_slots_or_history(threads: int, block: int, monkeypatch) -> None:
    placed: dict[tuple[str, int], set[int]] = {}
    occupy = SlotTable.occupy

    def noting(self, slots, owners, *rest) -> None:
        for slot, owner in zip(slots.tolist(), owners, strict=True):
            placed.setdefault((owner.group.request.request_id, owner.index), set()).add(slot)
        occupy(self, slots, owners, *rest)

    monkeypatch.setattr(SlotTable, "occupy", noting)
    async with running(deterministic=True, threads=threads, slots=7, block_rows=block, max_len=96) as engine:
        alone = {}
        for probe in PROBES:
            alone |= await outputs(engine, probe)
        for salt in range(4):
            others = neighbours(salt)
            batch = others[:salt] + PROBES[salt % 4 :] + others[salt:] + PROBES[: salt % 4]
            batched = await outputs(engine, *batch)
            for key, expected in alone.items():
                assert same_bits(batched[key], expected), (salt, key)
    assert all(len(slots) >= 2 for key, slots in placed.items() if key in alone), placed
    async with running(deterministic=True, threads=threads, slots=7, block_rows=block, max_len=96) as fresh:
        again = await outputs(fresh, *reversed(PROBES))
    assert all(same_bits(again[key], expected) for key, expected in alone.items())


async def test_bits_do_not_depend_on_other_rows_with_the_shapes_of_a_real_model() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    def smollm2(layers: int = 2):
        torch.manual_seed(0)
        return LlamaForCausalLM(
            LlamaConfig(vocab_size=2048, hidden_size=576, intermediate_size=1536, num_hidden_layers=layers, num_attention_heads=9,
                        num_key_value_heads=3, tie_word_embeddings=True, max_position_embeddings=128, eos_token_id=None)
        ).eval()  # fmt: skip

    async with running(smollm2(), deterministic=True, threads=2, slots=8, max_len=64) as engine:
        probe = request("p", length=9, seeds=(1, 2), max_tokens=8)
        alone = await outputs(engine, probe)
        batched = await outputs(
            engine, *(request(f"n{i}", length=3 + i, seeds=(1, 2), max_tokens=3 + i) for i in range(5)), probe
        )
    assert all(same_bits(batched[key], alone[key]) for key in alone)


@pytest.mark.parametrize("broken", ["prefill", "decode"])
async def test_an_engine_whose_rows_depend_on_each_other_does_not_start(broken: str, monkeypatch) -> None:
    plain = getattr(LlamaForward, broken)

    def leaking(self, ids, *rest):
        answer = plain(self, ids, *rest)
        logits = answer[0] if broken == "prefill" else answer
        logits[1:] += ids.float().mean() * 1e-6  # a tiny influence of the other rows
        return answer

    monkeypatch.setattr("rollout_workers.engines.transformers.forward.disagreement", lambda *_: None)
    monkeypatch.setattr(LlamaForward, broken, leaking)
    with pytest.raises(ModelUnsupported, match=broken):
        async with running(deterministic=True):
            pass
