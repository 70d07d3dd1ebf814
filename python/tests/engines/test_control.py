"""Abort, pause, offload, and new weights during sampling."""

import asyncio
import threading

import numpy as np
import pytest
import torch

from rollout_workers.engines.base import SampleDelta, SampleOutput
from rollout_workers.engines.errors import EngineFailed, NothingStaged, WeightsMismatch
from rollout_workers.engines.transformers import EngineConfig, TransformersEngine
from rollout_workers.weights import named_weights, weights_digest, write_weights

from .tiny import outputs, plain_logprobs, request, running, same_bits, tiny_model


class Collector:
    """Consumes ``generate`` in a task. ``until`` waits for a number of tokens of a sample."""

    def __init__(self, engine: TransformersEngine, *batch) -> None:
        self.outputs: dict[tuple[str, int], SampleOutput] = {}
        self.tokens: dict[tuple[str, int], int] = {}
        self._changed = asyncio.Event()
        self.task = asyncio.create_task(self._run(engine, batch))

    async def _run(self, engine: TransformersEngine, batch) -> None:
        async for item in engine.generate(batch):
            key = item.request_id, item.sample
            if isinstance(item, SampleDelta):
                self.tokens[key] = item.start + len(item.token_ids)
            else:
                self.outputs[key] = item
            self._changed.set()

    async def until(self, key: tuple[str, int], tokens: int) -> None:
        while self.tokens.get(key, 0) < tokens:
            await self._changed.wait()
            self._changed.clear()


def long_request(name: str, **more):
    """A sample that still runs when the test acts on it, because the loop pauses before it ends."""
    return request(name, stream=True, max_tokens=200, **more)


LONG = {"text": True, "max_len": 256}


async def test_abort_delivers_what_was_sampled() -> None:
    model = tiny_model()
    async with running(model, slots=2, **LONG) as engine:
        batch = long_request("a", seeds=(1, 2, 3)), long_request("b")
        run = Collector(engine, *batch)
        await run.until(("a", 0), 5)
        await engine.pause()
        assert await engine.abort(["a", "unknown", "a"]) == ("a",)
        assert await engine.abort(["a"]) == ()
        await engine.resume()
        await run.task
    got = run.outputs
    assert {got["a", i].finish_reason for i in range(3)} == {"aborted"} and got["b", 0].finish_reason == "length"
    assert len(got["a", 0].token_ids) >= 5 and len(got["a", 2].token_ids) == 0 and got["a", 2].version_spans == ()
    np.testing.assert_allclose(
        got["a", 0].raw_logprobs, plain_logprobs(model, batch[0].prompt_ids, got["a", 0].token_ids), atol=1e-4
    )


async def test_closing_the_iterator_aborts_its_requests() -> None:
    async with running(**LONG) as engine:
        stream = engine.generate([long_request("a")])
        await anext(stream)
        await stream.aclose()
        await engine.resume()  # a round trip through the decoding thread, after the abort
        assert engine.stats().active == 0


async def test_a_disconnected_caller_does_not_affect_the_engine() -> None:
    async with running(deterministic=True, **LONG) as engine:
        hold, held = threading.Event(), threading.Event()

        def block() -> None:
            held.set()
            hold.wait()

        blocking = asyncio.create_task(engine._ask(block))
        await asyncio.to_thread(held.wait)
        gone = [asyncio.create_task(engine.pause()) for _ in range(3)]
        await asyncio.sleep(0)
        for task in (blocking, *gone):
            task.cancel()
        await asyncio.gather(blocking, *gone, return_exceptions=True)
        hold.set()
        await engine.resume()
        assert await outputs(engine, request("a"))


async def test_a_caller_that_disconnects_while_submitting_leaves_no_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(**LONG) as engine:
        submitted, hold = threading.Event(), threading.Event()
        submit = engine._submit

        def slowly(*given) -> None:
            submit(*given)
            submitted.set()
            hold.wait()

        monkeypatch.setattr(engine, "_submit", slowly)
        gone = Collector(engine, long_request("a")).task
        await asyncio.to_thread(submitted.wait)
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        hold.set()
        await engine.resume()  # a round trip through the decoding thread, after the abort
        assert (engine.stats().active, engine.stats().queued) == (0, 0)


async def test_resume_continues_with_the_same_bits_after_pause() -> None:
    async with running(deterministic=True, **LONG) as engine:
        alone = (await outputs(engine, long_request("a")))["a", 0]
        run = Collector(engine, long_request("a"))
        await run.until(("a", 0), 3)
        await engine.pause()
        await engine.pause()
        steps = engine.stats().steps
        queued = Collector(engine, request("q"))
        assert (await engine.weights_digest()).startswith("blake3-")  # calls are answered, but no step is made
        assert engine.stats().steps == steps and engine.stats().paused and not queued.outputs
        await engine.resume()
        await asyncio.gather(run.task, queued.task)
        assert same_bits(run.outputs["a", 0], alone) and engine.stats().steps > steps


async def test_offload_and_onload_keep_the_bits_of_samples_in_flight() -> None:
    async with running(deterministic=True, **LONG) as engine:
        alone = (await outputs(engine, long_request("a")))["a", 0]
        run = Collector(engine, long_request("other"), long_request("a"))
        await run.until(("a", 0), 3)
        for _ in range(2):
            await engine.offload()
            await engine.offload()
            steps = engine.stats().steps
            await engine.weights_digest()
            assert engine.stats().steps == steps
            await engine.onload()
            await engine.onload()
        await run.task
        assert same_bits(run.outputs["a", 0], alone)


@pytest.mark.parametrize("policy", ["keep", "recompute"])
async def test_a_swap_in_flight_starts_a_span_under_the_new_weights(policy: str) -> None:
    old, new = tiny_model(1), tiny_model(2)
    async with running(tiny_model(1), kv_on_swap=policy, version=7, slots=2, **LONG) as engine:
        batch = long_request("a", length=9, seeds=(1, 2, 3))
        run = Collector(engine, batch)
        await run.until(("a", 0), 4)
        assert await engine.stage_weights(dict(named_weights(new))) == weights_digest(named_weights(new)).root
        assert await engine.weights_digest() == weights_digest(named_weights(old)).root
        await engine.swap_weights(8)
        assert await engine.weights_digest() == weights_digest(named_weights(new)).root
        assert (engine.stats().version, engine.stats().cache_epoch) == (8, 1)
        await run.task
    for sample in range(2):
        out = run.outputs["a", sample]
        first, second = out.version_spans
        cut = first.end
        assert (first.version, first.start, second.version, second.start, second.end) == (7, 0, 8, cut, 200) and cut >= 4
        before = plain_logprobs(old, batch.prompt_ids, out.token_ids)[:cut]
        if policy == "recompute":
            after = plain_logprobs(new, batch.prompt_ids, out.token_ids)[cut:]
        else:
            after = continued_logprobs(old, new, batch.prompt_ids, out.token_ids, cut)
        np.testing.assert_allclose(out.raw_logprobs, np.concatenate((before, after)), atol=2e-4)
    waited = run.outputs["a", 2]  # waited for the two slots, so its prompt runs with the new weights
    assert [span.version for span in waited.version_spans] == [8]
    np.testing.assert_allclose(waited.raw_logprobs, plain_logprobs(new, batch.prompt_ids, waited.token_ids), atol=2e-4)


@torch.no_grad()
def continued_logprobs(old, new, prompt, tokens, cut: int) -> np.ndarray:
    """Logprobs of tokens[cut:] with ``new`` weights, over the keys and values that ``old`` weights
    computed for the tokens before."""
    ids = torch.tensor([[*prompt, *(int(t) for t in tokens)]])
    known = len(prompt) + cut - 1  # the last token before the cut has no KV yet
    past = old(input_ids=ids[:, :known], use_cache=True).past_key_values
    logits = new(input_ids=ids[:, known:-1], past_key_values=past, use_cache=True).logits[0]
    table = logits.log_softmax(-1)
    return table[torch.arange(len(table)), ids[0, known + 1 :]].numpy()


async def test_a_flipped_byte_changes_the_digest() -> None:
    model = tiny_model()
    async with running(model) as engine:
        before = await engine.weights_digest()
        assert before == weights_digest(named_weights(tiny_model())).root == await engine.weights_digest()
        for name in ("model.layers.1.self_attn.k_proj.weight", "model.layers.0.mlp.up_proj.weight", "model.embed_tokens.weight"):
            tensor = dict(model.named_parameters())[name]
            raw = tensor.detach().view(torch.uint8).view(-1)
            raw[5] ^= 1
            assert await engine.weights_digest() != before
            raw[5] ^= 1
        assert await engine.weights_digest() == before


async def test_decoding_uses_the_weights_of_the_folder(tmp_path) -> None:
    new = tiny_model(5)
    tiny_model().config.save_pretrained(tmp_path / "base")
    manifest = write_weights(tmp_path / "v1", new, config_source_dir=tmp_path / "base", version=1, fsync=False)
    async with running() as engine:
        assert await engine.stage_weights(tmp_path / "v1") == manifest.digest
        assert await engine.stage_weights(str(tmp_path / "v1")) == manifest.digest
        await engine.swap_weights(1)
        await engine.swap_weights(1)  # nothing is staged and the version is current, so nothing happens
        assert await engine.weights_digest() == manifest.digest
        out = (await outputs(engine, request("a")))["a", 0]
        with pytest.raises(NothingStaged):
            await engine.swap_weights(2)
    np.testing.assert_allclose(out.raw_logprobs, plain_logprobs(new, request("a").prompt_ids, out.token_ids), atol=1e-4)
    assert out.version_spans[0].version == 1


async def test_weights_that_are_published_in_half_precision_keep_their_digest(tmp_path) -> None:
    tiny_model().config.save_pretrained(tmp_path / "base")
    manifest = write_weights(
        tmp_path / "v1", tiny_model(5), config_source_dir=tmp_path / "base", version=1, dtype=torch.bfloat16, fsync=False
    )
    async with running() as engine:
        assert await engine.stage_weights(tmp_path / "v1") == manifest.digest
        await engine.swap_weights(1)
        assert await engine.weights_digest() == manifest.digest


async def test_the_error_for_weights_of_another_shape_names_the_tensor(tmp_path) -> None:
    tiny_model().config.save_pretrained(tmp_path / "base")
    write_weights(tmp_path / "v1", tiny_model(5), config_source_dir=tmp_path / "base", version=1, fsync=False)
    file = tmp_path / "v1" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + bytes([file.read_bytes()[-1] ^ 1]))
    tensors = dict(named_weights(tiny_model()))
    norm = "model.norm.weight"
    async with running() as engine:
        before = await engine.weights_digest()
        for source, name in (
            (tmp_path / "v1", "model."),
            ({k: v for k, v in tensors.items() if k != norm}, norm),
            (tensors | {"extra": tensors[norm]}, "extra"),
            (tensors | {norm: tensors[norm][:-1]}, norm),
            (tensors | {norm: tensors[norm].double()}, norm),
        ):
            with pytest.raises(WeightsMismatch) as caught:
                await engine.stage_weights(source)
            assert name in caught.value.tensor and caught.value.expected != caught.value.got
        with pytest.raises(NothingStaged):
            await engine.swap_weights(1)
        assert await engine.weights_digest() == before


async def test_a_failed_forward_pass_ends_the_samples_but_not_the_engine(monkeypatch) -> None:
    async with running(slots=2) as engine:
        clean = await outputs(engine, request("good"))
        forward = engine._thread.decoder.forward
        with monkeypatch.context() as patch:
            patch.setattr(forward, "prefill", lambda *_: (_ for _ in ()).throw(RuntimeError("out of memory")))
            found = await outputs(engine, request("a", seeds=(1, 2, 3)), request("b"))
        assert len(found) == 4
        assert all(isinstance(o.error, EngineFailed) and "out of memory" in str(o.error) for o in found.values())
        assert same_bits((await outputs(engine, request("good")))["good", 0], clean["good", 0])


async def test_shutdown_delivers_what_is_in_flight() -> None:
    engine = TransformersEngine(tiny_model(), EngineConfig(slots=2, max_len=256, threads=1))
    task = asyncio.create_task(outputs(engine, request("a", seeds=(1, 2, 3), max_tokens=200)))
    await engine_has_work(engine)
    await engine.shutdown()
    assert {o.finish_reason for o in (await task).values()} <= {"aborted", "length"} and len(task.result()) == 3


async def engine_has_work(engine: TransformersEngine) -> None:
    while not engine.stats().active and not engine.stats().generated_tokens:
        await engine.resume()


async def test_stats_count_samples_and_tokens() -> None:
    async with running() as engine:
        await outputs(engine, request("a", length=6, seeds=range(10), max_tokens=5))
        stats = engine.stats()
    assert (stats.slots, stats.active, stats.queued, stats.generated_tokens, stats.prompt_tokens) == (8, 0, 0, 50, 6)
    assert stats.tokens_per_second > 0 and stats.busy_seconds > 0
