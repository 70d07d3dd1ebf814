"""The parts of the engine `sglang` that need no SGLang. The real engine:
`e2e/test_sglang_engine.py`."""

from __future__ import annotations

import asyncio
import inspect
import json
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from rollout_workers.engines.base import Constraint, SamplingParams, VersionSpan
from rollout_workers.engines.served.parts import Parts
from rollout_workers.engines.sglang import SequenceGroup, SGLangWorker
from rollout_workers.engines.sglang.sampling import PENALTIES, engine_params, signed
from rollout_workers.engines.sglang.stitch import stitch
from rollout_workers.engines.sglang.worker import WeightReloadInvalid, WeightReloadRefused


def test_the_worker_is_imported_without_torch_or_sglang() -> None:
    code = "import sys, rollout_workers.engines.sglang; assert not {'torch', 'sglang'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


# ---- parameters --------------------------------------------------------------------------------


def params(**values: Any) -> dict[str, Any]:
    chosen: dict[str, Any] = {"max_tokens": 8} | values
    return engine_params(SamplingParams(**chosen), 7, room=20, prompt=3, end_ids=(2,))


def test_every_request_has_its_seed_and_no_top_k_is_all() -> None:
    found = params()
    assert found["sampling_seed"] == 7 and found["top_k"] == -1 and found["max_new_tokens"] == 8
    assert "custom_params" not in found and "logit_bias" not in found


@pytest.mark.parametrize(("seed", "stored"), [(0, 0), (2**63 - 1, 2**63 - 1), (2**63, -(2**63)), (2**64 - 1, -1)])
def test_seeds_keep_their_64_bits(seed: int, stored: int) -> None:
    assert signed(seed) == stored and stored % 2**64 == seed


def test_the_budget_of_a_continued_sample_is_what_it_lacks() -> None:
    assert engine_params(SamplingParams(8), 1, room=20, prompt=3, continued=5)["max_new_tokens"] == 3
    assert engine_params(SamplingParams(80), 1, room=20, prompt=3, continued=5)["max_new_tokens"] == 20


def test_penalties_go_to_the_processor_with_the_tokens_that_end_a_sample() -> None:
    wanted = json.loads(params(min_tokens=2, stop_token_ids=(9,), frequency_penalty=0.5)["custom_params"][PENALTIES])
    assert wanted == {"prompt": 3, "repetition": 1.0, "presence": 0.0, "frequency": 0.5, "min_tokens": 2, "ends": [2, 9]}
    wanted = json.loads(params(min_tokens=2, ignore_eos=True)["custom_params"][PENALTIES])
    assert wanted["ends"] == []


@pytest.mark.parametrize(
    ("kind", "value", "name", "sent"),
    [
        ("json_schema", '{"type": "number"}', "json_schema", '{"type": "number"}'),
        ("json_object", "", "json_schema", '{"type": "object"}'),
        ("regex", "[0-9]+", "regex", "[0-9]+"),
        ("grammar", 'root ::= "a"', "ebnf", 'root ::= "a"'),
        ("choices", '["a+", "b"]', "regex", r"(a\+|b)"),
    ],
)
def test_constraints(kind: Any, value: str, name: str, sent: str) -> None:
    assert params(constraint=Constraint(kind, value))[name] == sent


# ---- stitching ---------------------------------------------------------------------------------


def chunk(ids: list[int], total: int, versions: list[tuple[str, int, int]], finish: str | None = None) -> dict[str, Any]:
    return {
        "output_ids": ids,
        "meta_info": {
            "output_token_logprobs": [(-0.5 * i, i, None) for i in ids],
            "output_top_logprobs": [[(-0.1, i, None), (-0.2, i + 1, None)] for i in ids],
            "completion_tokens": total,
            "weight_versions": [{"version": version, "start": start, "end": end} for version, start, end in versions],
            "finish_reason": finish and {"type": finish},
        },
    }


def test_chunks_of_a_stream_join() -> None:
    parts = Parts()
    assert parts.add(chunk([3], 1, [("0", 0, 1)])) == 1
    assert parts.add(chunk([4, 5], 3, [("0", 0, 1), ("1", 1, 3)], "length")) == 2
    assert parts.ids == [3, 4, 5] and parts.logprobs == [-1.5, -2.0, -2.5]
    assert parts.top[2] == ([5, 6], [-0.1, -0.2]) and parts.finish == {"type": "length"}
    assert parts.version_spans(9) == (VersionSpan(0, 0, 1), VersionSpan(1, 1, 3))
    parts.cut(1)
    assert parts.ids == [3] and parts.version_spans(9) == (VersionSpan(0, 0, 1),)


def test_an_abort_that_repeats_the_last_id_adds_nothing() -> None:
    parts = Parts()
    parts.add(chunk([3, 4], 2, [("0", 0, 2)]))
    assert parts.add(chunk([4], 2, [("0", 0, 2)], "abort")) == 0 and parts.ids == [3, 4]


def test_tokens_after_the_last_reported_span_have_the_current_version() -> None:
    parts = Parts()
    parts.add(chunk([3], 1, [("0", 0, 1)]))
    parts.add(chunk([4], 2, []))
    assert parts.version_spans(1) == (VersionSpan(0, 0, 1), VersionSpan(1, 1, 2))
    assert parts.version_spans(0) == (VersionSpan(0, 0, 2),)


def test_segments_stitch_ids_logprobs_and_spans() -> None:
    """Each segment counts as much as the last one."""
    first = chunk([3, 4], 2, [("0", 0, 2)], "abort")
    second = chunk([5], 1, [("0", 0, 1)], "abort")
    third = chunk([6, 7], 2, [("0", 0, 1), ("1", 1, 2)], "stop")
    whole = stitch([stitch([first, second], 9), third], 9)
    meta = whole["meta_info"]
    assert whole["output_ids"] == [3, 4, 5, 6, 7] == [pair[1] for pair in meta["output_token_logprobs"]]
    assert meta["weight_versions"] == [{"version": "0", "start": 0, "end": 4}, {"version": "1", "start": 4, "end": 5}]
    assert meta["completion_tokens"] == 5 and meta["finish_reason"] == {"type": "stop"} and len(meta["output_top_logprobs"]) == 5


def test_an_aborted_sample_at_the_limit_has_ended() -> None:
    whole = stitch([chunk([3, 4], 2, [("0", 0, 2)], "abort")], 2)
    assert whole["meta_info"]["finish_reason"] == {"type": "length", "length": 2}


# ---- SGLangWorker ------------------------------------------------------------------------------


class FakeEngine:
    """Records calls. Answers each prompt with the id after its last one."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self.hold: asyncio.Event | None = None
        self.tokenizer_manager = self

    async def async_generate(self, **call: Any) -> Any:
        self.calls.append(call)
        if self.hold is not None:
            await self.hold.wait()
            return chunk([call["input_ids"][-1] + 1], 1, [("0", 0, 1)], "abort")
        many = isinstance(call["input_ids"][0], list)
        count = call["sampling_params"]["max_new_tokens"] if isinstance(call["sampling_params"], dict) else 1
        found = [
            chunk([ids[-1] + 1 + n for n in range(count)], count, [("1", 0, count)], "length")
            for ids in (call["input_ids"] if many else [call["input_ids"]])
        ]
        return found if many else found[0]

    def abort_request(self, abort_all: bool = False) -> None:
        assert abort_all and self.hold is not None
        self.hold.set()
        self.hold = None


def config(**sampling: Any) -> Any:
    values = {"do_sample": True, "temperature": 0.9, "top_k": 5, "top_p": 0.8, "repetition_penalty": 1.1, "max_new_tokens": 4}
    return SimpleNamespace(rollout={"model": {"model_path": "/none"}}, algorithm={"sampling_params": values | sampling})


def worker(weight_reload: Any = "sync") -> tuple[SGLangWorker, FakeEngine]:
    found, engine = SGLangWorker(config(), SimpleNamespace(is_collocated=False), weight_reload), FakeEngine()
    found._engine = engine
    return found, engine


def test_signatures_are_those_of_rlinf() -> None:
    def plain(function: Any) -> list[tuple[str, Any]]:
        return [(name, found.default) for name, found in inspect.signature(function).parameters.items()]

    empty = inspect.Parameter.empty
    assert plain(SGLangWorker) == [("config", empty), ("placement", empty), ("weight_reload", "sync"), ("config_rollout", None)]
    assert plain(SGLangWorker.get_sampling_param_from_config) == [("cfg_sampling_params", empty)]
    assert plain(SGLangWorker.async_generate)[1:] == [
        ("prompt", None),
        ("sampling_params", None),
        ("input_ids", None),
        ("image_data", None),
        ("return_logprob", False),
        ("request_info", None),
    ]
    for name in ("offload_engine", "onload_engine", "abort_generation", "sync_model_from_actor", "shutdown", "init_worker"):
        assert plain(getattr(SGLangWorker, name)) == [("self", empty)]


def test_sampling_parameters_of_a_config() -> None:
    greedy = SGLangWorker.get_sampling_param_from_config(config(do_sample=False).algorithm["sampling_params"])
    assert greedy == {"temperature": 0, "max_new_tokens": 4}
    sampled = SGLangWorker.get_sampling_param_from_config(SimpleNamespace(**config().algorithm["sampling_params"]))
    assert sampled == {"temperature": 0.9, "top_k": 5, "top_p": 0.8, "repetition_penalty": 1.1, "max_new_tokens": 4}


def test_rank_and_world_size_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (worker()[0]._rank, worker()[0]._world_size) == (0, 1)
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert (worker()[0]._rank, worker()[0]._world_size) == (3, 8)


def test_an_unknown_weight_reload_is_an_error() -> None:
    with pytest.raises(WeightReloadInvalid, match="'disk' is not one of 'sync', 'cpu', None"):
        worker("disk")


@pytest.mark.parametrize(
    ("weight_reload", "refused"),
    [
        (None, ("offload_engine", "onload_engine", "sync_model_from_actor")),
        ("cpu", ("sync_model_from_actor",)),
        ("sync", ("onload_engine",)),
    ],
)
async def test_weight_reload_decides_which_calls_are_possible(weight_reload: Any, refused: tuple[str, ...]) -> None:
    found, _ = worker(weight_reload)
    for name in refused:
        with pytest.raises(WeightReloadRefused, match=f"{name} is not possible with weight_reload = {weight_reload!r}"):
            await getattr(found, name)()


async def test_generate_returns_input_ids_and_keeps_the_request_info() -> None:
    found, engine = worker()
    info = {"secret": 1}
    result, returned = await found.async_generate(
        input_ids=[1, 2], sampling_params={"max_new_tokens": 1}, image_data=[None, ""], request_info=info
    )
    assert result["input_ids"] == [1, 2] and returned is info
    assert set(engine.calls[0]) == {"prompt", "sampling_params", "input_ids", "image_data", "return_logprob"}
    assert engine.calls[0]["image_data"] is None
    results, _ = await found.async_generate(input_ids=[[1], [2, 3]], sampling_params=[{}, {}], image_data=["a", None])
    assert [one["input_ids"] for one in results] == [[1], [2, 3]] and engine.calls[1]["image_data"] == ["a", None]


async def test_a_group_continues_after_an_abort_with_what_is_left() -> None:
    found, engine = worker()
    engine.hold = asyncio.Event()
    group = SequenceGroup([1, 2], 2)
    running = asyncio.create_task(found.generate_group(group))
    while len(engine.calls) < 2:
        await asyncio.sleep(0)
    partial = await found.abort_generation()
    await running
    assert [result["output_ids"] for result in partial] == [[3], [3]] and group.aborted == {0, 1}
    await found.generate_group(group)
    assert group.all_completed
    for call in engine.calls[2:]:
        assert call["input_ids"] == [1, 2, 3] and call["sampling_params"]["max_new_tokens"] == 3
    for result in group.results:
        assert result is not None and result["output_ids"] == [3, 4, 5, 6] and result["input_ids"] == [1, 2]
        assert result["meta_info"]["weight_versions"] == [
            {"version": "0", "start": 0, "end": 1},
            {"version": "1", "start": 1, "end": 4},
        ]
        assert len(result["meta_info"]["output_token_logprobs"]) == 4
    assert await found.abort_generation() == []


async def test_an_abort_at_the_limit_completes_the_sample() -> None:
    found, engine = worker()
    group = SequenceGroup([1], 1)
    group.record(0, chunk([2, 3, 4, 5], 4, [("0", 0, 4)], "abort"), 4)
    assert group.all_completed and await found.generate_group(group) is group and not engine.calls


def test_shutdown_may_be_repeated() -> None:
    found, _ = worker()
    found.shutdown()
    found.shutdown()
