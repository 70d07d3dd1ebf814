"""Log-probabilities of a prompt's tokens, also while the engine decodes."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PhiConfig,
    PhiForCausalLM,
)

from rollout_workers.engines.errors import ContextOverflow, EngineClosed, InvalidPrompt, NothingStaged
from rollout_workers.engines.transformers.score import linear_head, logprobs_of
from rollout_workers.weights import named_weights

from .tiny import VOCABULARY, outputs, request, running, same_bits, tiny_model

PROMPTS = [np.array(ids, np.int32) for ids in ([5], [5, 9], [3] * 64, list(range(40)))]


def plain(model, ids: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        logprobs = model(input_ids=torch.from_numpy(ids.astype(np.int64))[None]).logits[0].log_softmax(-1)
    return np.array([0.0] + [float(logprobs[at - 1, int(ids[at])]) for at in range(1, len(ids))], np.float32)


async def test_scores_equal_a_plain_forward() -> None:
    async with running() as engine:
        found = await asyncio.gather(*(engine.prompt_logprobs(ids) for ids in PROMPTS))
    for ids, scored in zip(PROMPTS, found, strict=True):
        assert scored.logprobs.dtype == np.float32 and scored.top is None
        np.testing.assert_allclose(scored.logprobs, plain(tiny_model(), ids), atol=1e-5)


async def test_the_most_likely_tokens_are_those_of_a_plain_forward() -> None:
    ids = PROMPTS[3]
    async with running() as engine:
        found = await engine.prompt_logprobs(ids, top=5)
        everything = await engine.prompt_logprobs(PROMPTS[0], top=1000)
    with torch.no_grad():
        table = tiny_model()(input_ids=torch.from_numpy(ids.astype(np.int64))[None]).logits[0].log_softmax(-1)
    expected = table.topk(5)
    assert found.top is not None and everything.top is not None
    assert found.top.token_ids.dtype == np.int32 and found.top.token_ids[1:].tolist() == expected.indices[:-1].tolist()
    np.testing.assert_allclose(found.top.logprobs[1:], expected.values[:-1], atol=1e-5)
    assert (found.top.token_ids[0] == -1).all() and (found.top.logprobs[0] == 0).all()
    assert everything.top.token_ids.shape == (1, VOCABULARY)


SMALL = {"vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
         "num_key_value_heads": 2}  # fmt: skip
HEADS = {
    "linear": (lambda: LlamaForCausalLM(LlamaConfig(**SMALL)), True),
    "with a bias": (lambda: PhiForCausalLM(PhiConfig(**SMALL)), True),
    "scaled": (lambda: GraniteForCausalLM(GraniteConfig(**SMALL, logits_scaling=4.0)), False),
    "capped": (lambda: Gemma2ForCausalLM(Gemma2Config(**SMALL, head_dim=8, final_logit_softcapping=1.0)), False),
    "capped far off": (lambda: Gemma2ForCausalLM(Gemma2Config(**SMALL, head_dim=8, final_logit_softcapping=1e6)), False),
}


@pytest.mark.parametrize("name", HEADS)
def test_scores_equal_a_plain_forward_for_every_kind_of_head(name: str) -> None:
    """Three rows at a time if the head is linear. More logits are never in memory then."""
    build, linear = HEADS[name]
    torch.manual_seed(0)
    model = build().eval()
    for parameter in model.get_output_embeddings().parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    assert linear_head(model) == linear
    sizes: list[int] = []
    model.get_output_embeddings().register_forward_hook(lambda _, given, made: sizes.append(made.numel()))
    prompt = np.random.default_rng(0).integers(0, 60, 23)
    found = logprobs_of(model, prompt, linear=linear, held=3 * 60 + 59).logprobs
    assert max(sizes) == (3 * 60 if linear else 23 * 60)
    np.testing.assert_allclose(found, plain(model, prompt), atol=1e-5)


async def test_samples_keep_their_bits_while_prompts_are_scored() -> None:
    async with running(deterministic=True) as engine:
        alone = await outputs(engine, request("a", max_tokens=24))
        during, *scored = await asyncio.gather(
            outputs(engine, request("a", max_tokens=24)), *(engine.prompt_logprobs(ids) for ids in PROMPTS)
        )
        again = [await engine.prompt_logprobs(ids) for ids in PROMPTS]
    assert all(same_bits(during[key], alone[key]) for key in alone)
    assert all(a.logprobs.tobytes() == b.logprobs.tobytes() for a, b in zip(scored, again, strict=True))


@pytest.mark.parametrize(
    ("ids", "error"), [([], InvalidPrompt), ([257], InvalidPrompt), ([-1], InvalidPrompt), ([1] * 65, ContextOverflow)]
)
async def test_an_invalid_prompt_does_not_fail_others(ids: list[int], error: type[Exception]) -> None:
    async with running() as engine:
        with pytest.raises(error):
            await engine.prompt_logprobs(np.array(ids, np.int32))
        assert len((await engine.prompt_logprobs(PROMPTS[1])).logprobs) == 2


async def test_scores_use_new_weights_and_wait_while_paused() -> None:
    async with running() as engine:
        before = (await engine.prompt_logprobs(PROMPTS[3])).logprobs
        await engine.pause()
        waiting = asyncio.create_task(engine.prompt_logprobs(PROMPTS[3]))
        left = asyncio.create_task(engine.prompt_logprobs(PROMPTS[3]))
        await engine.stage_weights({name: tensor.clone() for name, tensor in named_weights(tiny_model(seed=1))})
        await engine.swap_weights(1)
        left.cancel()
        assert not waiting.done()
        await engine.resume()
        after = (await waiting).logprobs
    np.testing.assert_allclose(after, plain(tiny_model(seed=1), PROMPTS[3]), atol=1e-5)
    assert np.abs(after - before).max() > 0.1


async def test_shutdown_fails_waiting_prompts() -> None:
    async with running() as engine:
        await engine.pause()
        waiting = asyncio.create_task(engine.prompt_logprobs(PROMPTS[0]))
        with pytest.raises(NothingStaged):
            await engine.swap_weights(7)  # after the call of the task
        await engine.shutdown()
        with pytest.raises(EngineClosed):
            await waiting
