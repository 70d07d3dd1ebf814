"""Compares the engine's samples with the module's own forward and ``model.generate``."""

from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from rollout_workers.engines.errors import (
    ContextOverflow,
    DuplicateRequest,
    EngineClosed,
    InvalidParameters,
    InvalidPrompt,
    ModelUnsupported,
    NonFiniteLogits,
)
from rollout_workers.engines.transformers.forward import choose_forward
from rollout_workers.engines.transformers.generic import GenericForward
from rollout_workers.engines.transformers.llama import LlamaForward

from .tiny import END, outputs, plain_logits, plain_logprobs, request, running, same_bits, tiny_model

SMALL = {
    "vocab_size": 257, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.2,
}  # fmt: skip
MODELS = {
    "qwen3": tiny_model,
    "llama": lambda: LlamaForCausalLM(
        LlamaConfig(
            **SMALL,
            rope_parameters={
                "rope_type": "llama3",
                "rope_theta": 1e4,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            },
        )
    ),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SMALL)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SMALL)),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=257, n_embd=48, n_layer=2, n_head=4, n_positions=64, initializer_range=0.2)
    ),
}


@pytest.mark.parametrize("name", MODELS)
async def test_logprobs_are_those_of_a_plain_forward(name: str) -> None:
    torch.manual_seed(1)
    model = MODELS[name]().eval()
    assert isinstance(choose_forward(model, 64), GenericForward if name == "gpt2" else LlamaForward)
    batch = [
        request(f"r{i}", length=1 + 5 * i, seeds=(i, 10 + i, 20 + i), temperature=0.8, max_tokens=3 + 4 * i) for i in range(6)
    ]
    async with running(model, slots=4) as engine:  # 18 samples in 4 slots, with a queue, partial groups, and compaction
        found = await outputs(engine, *batch)
    assert len(found) == 18
    for r in batch:
        for sample in range(3):
            out = found[r.request_id, sample]
            assert out.finish_reason == "length" and len(out.token_ids) == r.params.max_tokens
            np.testing.assert_allclose(out.raw_logprobs, plain_logprobs(model, r.prompt_ids, out.token_ids), atol=1e-4)
            tempered = (plain_logits(model, r.prompt_ids, out.token_ids) / 0.8).log_softmax(-1)
            expected = tempered[torch.arange(len(tempered)), torch.from_numpy(out.token_ids.astype(np.int64))]
            np.testing.assert_allclose(out.logprobs, expected, atol=1e-4)
            assert [(s.version, s.start, s.end) for s in out.version_spans] == [(0, 0, len(out.token_ids))]


async def test_greedy_equals_generate() -> None:
    model = tiny_model()
    batch = [request(f"g{i}", length=7, temperature=0, max_tokens=20) for i in range(5)]
    expected = cast(Any, model).generate(
        torch.tensor([r.prompt_ids for r in batch]), max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    async with running(model) as engine:
        found = await outputs(engine, *batch)
    for i, r in enumerate(batch):
        assert found[r.request_id, 0].token_ids.tolist() == expected[i, 7:].tolist()
        assert (found[r.request_id, 0].logprobs == 0).all()


async def test_seeds_reproduce_and_differ() -> None:
    async with running() as engine:
        first = await outputs(engine, request("a", seeds=(1, 2, 1), max_tokens=16))
        again = await outputs(engine, request("a", seeds=(2, 1, 7), max_tokens=16))
    tokens = {k: v.token_ids.tolist() for k, v in first.items()}
    assert tokens["a", 0] == tokens["a", 2] == again["a", 1].token_ids.tolist()
    assert tokens["a", 1] == again["a", 0].token_ids.tolist()
    assert len({tuple(tokens["a", 0]), tuple(tokens["a", 1]), tuple(again["a", 2].token_ids.tolist())}) == 3


async def test_a_sample_ends_at_an_end_token_and_keeps_it() -> None:
    async with running() as engine:
        free = (await outputs(engine, request("a", max_tokens=20)))["a", 0].token_ids.tolist()
        at = next(i for i in range(3, 20) if free[i] not in free[:i])
        stopped = (await outputs(engine, request("a", max_tokens=20, stop_token_ids=(999, free[at]))))["a", 0]
    assert stopped.token_ids.tolist() == free[: at + 1]
    assert stopped.finish_reason == "stop" and stopped.text is None


async def test_the_models_own_end_token_ends_a_sample_unless_ignored() -> None:
    model = tiny_model()
    with torch.no_grad():
        model.model.embed_tokens.weight[END] *= 4  # the tied weights make the end token likely
    batch = [request("stops", seeds=range(16), ignore_eos=False, max_tokens=40), request("goes", seeds=range(16), max_tokens=40)]
    async with running(model) as engine:
        found = await outputs(engine, *batch)
    ended = [o for (name, _), o in found.items() if name == "stops" and o.finish_reason == "stop"]
    assert ended and all(END not in o.token_ids[:-1] and o.token_ids[-1] == END for o in ended)
    assert all(o.finish_reason == "length" for (name, _), o in found.items() if name == "goes")


async def test_the_context_ends_a_sample() -> None:
    async with running(max_len=16) as engine:
        out = (await outputs(engine, request("a", length=10, max_tokens=50)))["a", 0]
    assert len(out.token_ids) == 6 and out.finish_reason == "length"


async def test_invalid_prompts_do_not_fail_others() -> None:
    async with running(max_len=16) as engine:
        found = await outputs(
            engine,
            request("long", length=16, seeds=(1, 2)),
            request("empty", prompt=()),
            request("alien", prompt=(1, 257)),
            request("good"),
        )
    assert [type(found[k].error) for k in (("long", 0), ("long", 1), ("empty", 0), ("alien", 0))] == [
        ContextOverflow, ContextOverflow, InvalidPrompt, InvalidPrompt,
    ]  # fmt: skip
    assert "max_len" in str(found["long", 0].error) and "257" in str(found["alien", 0].error)
    assert found["good", 0].finish_reason == "length" and found["good", 0].error is None


async def test_parameters_that_do_not_fit_the_model_do_not_fail_others() -> None:
    several = replace(request("several", seeds=(1, 2)), continued=(5, 6))
    beyond = replace(request("beyond"), continued=(257,))
    async with running() as engine:
        found = await outputs(engine, several, request("alien", logit_bias=((5, 1.0), (257, 1.0))), beyond, request("good"))
    assert [type(found[k].error) for k in (("several", 0), ("several", 1), ("alien", 0), ("beyond", 0))] == [
        InvalidParameters, InvalidParameters, InvalidParameters, InvalidPrompt,
    ]  # fmt: skip
    assert "2 seeds" in str(found["several", 0].error) and "257" in str(found["alien", 0].error)
    assert found["good", 0].error is None


async def test_a_continued_sample_that_is_complete_ends_at_once() -> None:
    stopped = replace(request("stopped", stop_token_ids=(5,)), continued=(4, 5))
    early = replace(request("early", stop_token_ids=(5,), min_tokens=2), continued=(4, 5))
    full = replace(request("full", length=14, max_tokens=50), continued=(4, 5))
    async with running(max_len=16) as engine:
        found = await outputs(engine, stopped, early, full)
    assert (found["stopped", 0].finish_reason, len(found["stopped", 0].token_ids)) == ("stop", 0)
    assert (found["early", 0].finish_reason, len(found["early", 0].token_ids)) == ("length", 6)
    assert (found["full", 0].finish_reason, len(found["full", 0].token_ids)) == ("length", 0)


async def test_non_finite_logits_end_a_sample_and_do_not_affect_later_ones() -> None:
    model = tiny_model()
    async with running(model, slots=2, deterministic=True) as engine:
        clean = (await outputs(engine, request("good")))["good", 0]
        good = {name: t.clone() for name, t in model.state_dict().items() if name != "lm_head.weight"}
        bad = good | {"model.norm.weight": torch.full_like(good["model.norm.weight"], torch.nan)}
        bad["model.layers.0.self_attn.v_proj.weight"] = torch.full_like(bad["model.layers.0.self_attn.v_proj.weight"], torch.nan)
        await engine.stage_weights(bad)
        await engine.swap_weights(1)
        broken = await outputs(engine, request("bad", length=14, seeds=(1, 2)))
        assert all(isinstance(o.error, NonFiniteLogits) and not len(o.token_ids) for o in broken.values())
        await engine.stage_weights(good)
        await engine.swap_weights(2)
        assert same_bits((await outputs(engine, request("good")))["good", 0], clean)


async def test_duplicate_request_ids_and_a_closed_engine_raise_errors() -> None:
    async with running() as engine:
        with pytest.raises(DuplicateRequest, match="twice"):
            await outputs(engine, request("twice"), request("twice"))
        assert len(await outputs(engine, request("twice"))) == 1
        await engine.shutdown()
        await engine.shutdown()
        with pytest.raises(EngineClosed):
            await outputs(engine, request("late"))


async def test_a_module_that_decodes_differently_is_rejected(monkeypatch) -> None:
    model = tiny_model()
    plain = model.forward
    model.forward = lambda *args, **kw: plain(*args, **(kw | {"position_ids": None}))
    monkeypatch.setattr(model.config, "model_type", "unknown")
    with pytest.raises(ModelUnsupported, match="plain forward"):
        async with running(model):
            pass


async def test_an_empty_batch_and_an_empty_group_end_at_once() -> None:
    async with running() as engine:
        assert await outputs(engine) == {}
        assert await outputs(engine, request("none", seeds=())) == {}
