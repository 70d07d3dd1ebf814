"""vLLM as an engine behind `engine.url`: a server that the user started (``serve.py``).

The server samples token ids through ``/inference/v1/generate``; its routes for reinforcement
learning pause it, load weights from a folder, and label them. They have no authentication: the
server must be reachable from this host alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
import tempfile
import threading
import uuid
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import httpx2
import torch
from transformers import AutoModelForCausalLM

from rollout_workers.engines.base import GroupRequest, SamplingParams
from rollout_workers.engines.errors import (
    EngineClosed,
    EngineError,
    EngineFailed,
    InvalidConstraint,
    InvalidParameters,
    ModelUnsupported,
)
from rollout_workers.engines.registry import LoadRequest
from rollout_workers.engines.served.engine import ServedEngine, has_tokenizer
from rollout_workers.engines.served.server import Asked, Scored
from rollout_workers.engines.vllm.parameters import constraint_of, parameters_of
from rollout_workers.engines.vllm.serve import ServerModel, ServerOptions, ServerUnreachable, start_it
from rollout_workers.weights import named_weights
from rollout_workers.weights.pretrained import load_whole
from rollout_workers.weights.store import TENSOR_FILE
from rollout_workers.weights.tensor_file import write_tensors

T = TypeVar("T")
log = logging.getLogger(__name__)

_LOOK_SECONDS = 1.0
_CALL_SECONDS = 600.0  # of a call that moves weights
_EXCERPT = 300


def load(request: LoadRequest) -> ServedEngine:
    """Connect to the server of `engine.url` for the registry, and give it the weights of the
    folder. Raises ``ServerUnreachable``, ``ServerOptions``, ``ServerModel``, ``ModelUnsupported``,
    ``WeightsIncomplete``."""
    if request.deterministic:
        raise ModelUnsupported("vLLM does not give the same bits each time: remove `deterministic = true`")
    server = RemoteServer(request)
    try:
        with tempfile.TemporaryDirectory(prefix="rollout-engine-") as folder:
            module = load_whole(AutoModelForCausalLM, request.folder, dtype=getattr(torch, request.dtype))
            write_tensors(Path(folder) / TENSOR_FILE, dict(named_weights(module)))
            del module
            server.call(server.first_weights(folder, str(request.version))).result()
        return ServedEngine(
            server, request.folder, slots=request.slots, max_len=request.max_len, dtype=request.dtype,
            version=request.version, text=has_tokenizer(request.folder), verify=request.verify,
        )  # fmt: skip
    except BaseException:
        server.close()
        raise


class RemoteServer:
    """A client of one vLLM server, which has no other. Coroutines run in its thread, through
    ``call``."""

    def __init__(self, request: LoadRequest) -> None:
        """Connect, and check what the server has; blocks. Raises ``ServerUnreachable``,
        ``ServerOptions``, ``ServerModel``, ``ModelUnsupported``."""
        self._request, self._url = request, request.url.rstrip("/")
        self._owner = secrets.token_hex(4)  # in the label of the weights: another client or a new server has another one
        self._label = ""
        self._room = asyncio.Semaphore(2 * request.slots)  # a client with thousands of streams is slow
        self._extended = True
        self._paused = self._loading = False
        self._failure: str | None = None
        self._listeners: list[Callable[[str], None]] = []
        self._loop = asyncio.new_event_loop()
        ready: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(ready,), name="vllm", daemon=True)
        self._thread.start()
        try:
            ready.result()
        except BaseException:
            self._thread.join()
            raise

    def call(self, coroutine: Coroutine[Any, Any, T], /) -> Future[T]:
        """Run a coroutine in the thread. Raises ``EngineClosed``, ``EngineFailed``."""
        if self._failure is not None:
            coroutine.close()
            raise EngineFailed(self._failure)
        if not self._thread.is_alive():
            coroutine.close()
            raise EngineClosed("the engine was shut down")
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def on_failure(self, listener: Callable[[str], None], /) -> None:
        self._listeners.append(listener)

    def refusal(self, request: GroupRequest, /) -> EngineError | None:
        """A continued sample can't have a constraint. Without the extension it can have no penalty
        either."""
        params = request.params
        if not len(request.continued):
            return None
        if params.constraint is not None:
            what = "a constraint"
        elif not self._extended and (params.presence_penalty or params.frequency_penalty):
            what = "a presence or frequency penalty"
        else:
            return None
        return InvalidParameters(
            f"request {request.request_id}: this server can't continue a sample with {what}; sample it again from its prompt"
        )

    async def stream(self, asked: Asked, /) -> AsyncGenerator[Mapping[str, Any], None]:
        """The chunks of one request, each with new tokens only. Closing the iterator aborts it."""
        body = {
            "request_id": uuid.uuid4().hex,
            "token_ids": asked.prompt + asked.continued,
            "sampling_params": self._params(asked),
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        async with self._room:
            body["cache_salt"] = f"{self._label}-{asked.salt}"
            count, spans = 0, [[self._version, 0, 0]]
            async with self._client.stream("POST", f"{self._url}/inference/v1/generate", json=body, timeout=None) as response:
                if response.status_code != 200:
                    raise _refused(asked.params, (await response.aread()).decode(errors="replace"))
                cached = 0
                ending: tuple[Any, dict[str, Any] | None] = ((), None)  # sent with what the server reports after it
                async for line in response.aiter_lines():
                    if not line.startswith("data: ") or line == "data: [DONE]":
                        continue
                    piece: dict[str, Any] = json.loads(line[6:])
                    if "error" in piece:
                        raise _refused(asked.params, json.dumps(piece["error"]))
                    cached = ((piece.get("usage") or {}).get("prompt_tokens_details") or {}).get("cached_tokens") or cached
                    for choice in piece["choices"]:
                        tokens = (choice.get("logprobs") or {}).get("content") or []
                        count += len(tokens)
                        if spans[-1][0] != self._version:
                            spans.append([self._version, spans[-1][2], count])
                        spans[-1][2] = count
                        if choice.get("finish_reason"):
                            if choice["finish_reason"] == "abort":
                                raise EngineFailed(
                                    f"another client of {self._url} aborted the sample: a server belongs to one worker"
                                )
                            finish = {"type": choice["finish_reason"]}
                            if choice.get("weight_versions"):
                                spans = [
                                    [self._own(span["version"]), span["start"], span["end"]] for span in choice["weight_versions"]
                                ]
                            ending = (tokens, finish)
                        else:
                            yield _chunk(tokens, asked.params.top_logprobs, count, spans)
                tokens, finish = ending
                yield _chunk(tokens, asked.params.top_logprobs, count, spans, finish, cached)

    async def score(self, prompt: list[int], top: int, /) -> Scored:
        """Score a prompt. Raises ``EngineFailed``."""
        params = {"temperature": 0, "max_tokens": 1, "prompt_logprobs": top, "detokenize": False}
        answer = await self._post("/inference/v1/generate", {"token_ids": prompt, "sampling_params": params})
        logprobs: list[float] = []
        rows: list[list[tuple[float, int]]] = []
        for token, entry in zip(prompt[1:], answer["prompt_logprobs"][1:], strict=True):
            pairs = {int(name): found["logprob"] for name, found in entry.items()}
            logprobs.append(pairs[token])
            rows.append(sorted(((logprob, other) for other, logprob in pairs.items()), key=lambda pair: -pair[0])[:top])
        return Scored(logprobs, rows if top else [])

    async def pause(self) -> None:
        """Hold all requests. Returns once no forward pass runs."""
        if not self._paused:
            await self._post("/pause?mode=keep&clear_cache=false")
            self._paused = True

    async def resume(self) -> None:
        """Undo ``pause``."""
        if self._paused:
            await self._post("/resume")
            self._paused = False

    async def load(self, folder: str, version: str, /) -> None:
        """Load the weights of a folder while paused, and drop keys and values of the former ones.
        Raises ``EngineFailed``."""
        label = f"{self._owner}.{version}"
        self._loading = True
        try:
            await self._load(folder)
            await self._forget()
            await self._post("/update_weight_version", {"new_version": label})
            self._label = label
        finally:
            self._loading = False

    async def release(self) -> None:
        """Do nothing: the memory is the server's."""

    async def restore(self) -> None:
        """Do nothing."""

    async def first_weights(self, folder: str, version: str) -> None:
        """End what another client left behind, and load the weights of the run. Raises
        ``ServerModel`` if they do not fit."""
        await self._post("/abort_requests", {})
        await self.pause()
        try:
            await self.load(folder, version)
        except EngineFailed as error:
            raise ServerModel(f"the model at {self._url} can't load the weights of {self._request.folder}: {error}; "
                              + start_it(self._request)) from error  # fmt: skip
        await self.resume()
        self._watching = self._loop.create_task(self._watch())

    def digest(self, dtypes: Mapping[str, str], /) -> str:
        """The root of the digest over the tensors in the server; blocks. Raises
        ``ModelUnsupported`` if they can't be read back."""
        if not self._extended:
            raise ModelUnsupported(f"the weights can't be read back from {self._url}: " + self._no_extension())
        found = self.call(self._rpc("rollout_digest")).result()
        if "digest" not in found:
            raise ModelUnsupported(f"the weights can't be read back from {self._url}: {found.get('error')}")
        return found["digest"]

    def close(self) -> None:
        """End the requests of this client, and let the server run; may be repeated."""
        if self._thread.is_alive():
            with contextlib.suppress(Exception):
                asyncio.run_coroutine_threadsafe(self.resume(), self._loop).result(timeout=5)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    @property
    def _version(self) -> str:
        return self._label.partition(".")[2]

    def _own(self, label: str) -> str:
        """The version of a label. Raises ``EngineFailed`` if it is another client's."""
        owner, _, version = label.partition(".")
        if owner != self._owner:
            raise EngineFailed(self._stolen(label))
        return version

    def _stolen(self, label: str) -> str:
        return (f"the server at {self._url} has the weights {label!r} instead of {self._label!r}: it was started again, or "
                "another worker uses it; give each worker its own server, and restart the worker")  # fmt: skip

    def _params(self, asked: Asked) -> dict[str, Any]:
        params, before = asked.params, len(asked.continued)
        ends = [*params.stop_token_ids, *(() if params.ignore_eos else asked.end_ids)]
        most = min(params.max_tokens - before, asked.room)
        found = parameters_of(params, seed=asked.seed, max_tokens=most, stop_ids=ends, continued=asked.continued)
        found["logprobs"] = params.top_logprobs + 1 if params.top_logprobs else 0  # the sampled token may be among them
        if params.constraint is not None:
            found["structured_outputs"] = constraint_of(params.constraint)
        if self._extended:
            found["extra_args"] = {**(found["extra_args"] or {}), "rollout_seed": asked.seed, "rollout_sampled_before": before}
        return found

    async def _load(self, folder: str) -> None:
        if not self._extended:
            await self._post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": folder}})
            return
        found = await self._rpc("rollout_load", folder)
        if "error" in found:
            raise EngineFailed(found["error"])

    async def _forget(self) -> None:
        """Drop keys and values. Requests in progress compute theirs again."""
        answer = await self._post("/reset_prefix_cache?reset_running_requests=true")
        if not answer.get("success"):
            raise EngineFailed(f"the server at {self._url} did not drop the keys and values of the former weights")

    async def _rpc(self, method: str, *args: str) -> dict[str, str]:
        """The answer of the first worker that reports an error, or of the first one."""
        results = (await self._post("/collective_rpc", {"method": method, "args": args}))["results"]
        return next((found for found in results if "error" in found), results[0])

    async def _post(self, path: str, body: Any = None) -> Any:
        try:
            # A new connection each time: the server may close one after a call that fails.
            response = await self._client.post(
                self._url + path, json=body, timeout=_CALL_SECONDS, headers={"Connection": "close"}
            )
        except httpx2.HTTPError as error:
            raise EngineFailed(f"the server at {self._url} did not answer {path.partition('?')[0]}: {error!r}") from error
        if response.status_code != 200:
            raise EngineFailed(f"{self._url}{path.partition('?')[0]} answers {response.status_code}: {_excerpt(response.text)}")
        return response.json() if response.content else {}

    # Checks

    async def _connect(self) -> None:
        self._client = httpx2.AsyncClient(
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=2 * self._request.slots), trust_env=False
        )
        model = await self._model()
        if (await self._status("GET", "/is_paused")) != 200:
            raise ServerOptions(f"{self._url} has no routes that load weights; " + start_it(self._request))
        if (await self._status("POST", "/inference/v1/generate")) in (403, 404):
            raise ServerOptions(f"{self._url} has no /inference/v1/generate; " + start_it(self._request))
        length = model.get("max_model_len") or 0
        if length <= self._request.max_len:
            raise ServerOptions(
                f"{self._url} has a context of {length} tokens, one more than `engine.max_model_len = {self._request.max_len}` "
                "is needed; " + start_it(self._request)
            )  # fmt: skip
        self._check_model(str(model.get("root") or ""))
        try:
            await self._rpc("rollout_digest")
        except EngineFailed:
            self._extended = False
            if self._request.verify != "none":
                raise ServerOptions(self._no_extension()) from None
        await self._check_logprobs()

    async def _model(self) -> dict[str, Any]:
        try:
            response = await self._client.get(f"{self._url}/v1/models", timeout=10)
            return response.json()["data"][0]
        except httpx2.HTTPError as error:
            raise ServerUnreachable(
                f"nothing answers at {self._url} (`engine.url`): {error!r}; " + start_it(self._request)
            ) from error
        except (ValueError, LookupError, TypeError) as error:
            raise ServerUnreachable(f"{self._url} (`engine.url`) is not a server of vLLM; " + start_it(self._request)) from error

    async def _status(self, method: str, path: str) -> int:
        return (await self._client.request(method, self._url + path, json={}, timeout=10)).status_code

    def _check_model(self, folder: str) -> None:
        """Compare the sizes of both models, if the server's is on this host. Raises
        ``ServerModel``."""
        ours, theirs = _sizes(self._request.folder), _sizes(folder)
        for name, value in theirs.items():
            if ours.get(name) != value:
                raise ServerModel(
                    f"the model at {self._url} ({folder}) has {name} = {value}, and that of the run ({self._request.folder}) "
                    f"has {ours.get(name)}; " + start_it(self._request)
                )

    async def _check_logprobs(self) -> None:
        """The only token that is allowed has probability 1. (``top_k = 1`` leaves several tokens if
        their logits are equal, as after a token with an embedding of zeros.) Raises
        ``ServerOptions``.
        """
        params = {"temperature": 1, "allowed_token_ids": [1], "max_tokens": 1, "logprobs": 0, "detokenize": False}
        answer = await self._post("/inference/v1/generate", {"token_ids": [0], "sampling_params": params})
        if answer["choices"][0]["logprobs"]["content"][0]["logprob"] < -1e-3:
            raise ServerOptions(
                f"{self._url} reports logprobs of another distribution than it samples; " + start_it(self._request)
            )

    def _no_extension(self) -> str:
        return (f"{self._url} was started without the worker extension, so its weights can't be read back; "
                + start_it(self._request) + 'or set `weights.verify = "none"`')  # fmt: skip

    # Thread

    def _run(self, ready: Future[None]) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._connect())
        except BaseException as error:
            self._loop.run_until_complete(self._client.aclose())
            self._loop.close()
            ready.set_exception(error)
            return
        ready.set_result(None)
        try:
            self._loop.run_forever()
        finally:
            tasks = asyncio.all_tasks(self._loop)
            for task in tasks:
                task.cancel()
            if tasks:
                self._loop.run_until_complete(asyncio.wait(tasks, timeout=5))
            self._loop.run_until_complete(self._client.aclose())
            self._loop.close()

    async def _watch(self) -> None:
        """Notice that the server has ended, was started again, or has other weights."""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            before = self._label
            if self._loading:
                continue
            try:
                response = await self._client.get(f"{self._url}/weight_info", timeout=_CALL_SECONDS)
                label = response.json()["weight_version"]
            except (httpx2.HTTPError, ValueError, LookupError) as error:
                self._fail(f"the server at {self._url} has ended: {error!r}; start it again, and restart the worker")
                return
            if label != before and not self._loading and before == self._label:
                self._fail(self._stolen(label))
                return

    def _fail(self, why: str) -> None:
        self._failure = why
        log.error(why)
        for listener in self._listeners:
            listener(why)


def _chunk(
    tokens: Any, top: int, count: int, spans: list[list[Any]], finish: dict[str, Any] | None = None, cached: int = 0
) -> dict[str, Any]:
    """A chunk in the form of ``Parts``."""
    meta: dict[str, Any] = {
        "output_token_logprobs": [(token["logprob"], token["token_id"]) for token in tokens],
        "completion_tokens": count,
        "weight_versions": [{"version": version, "start": start, "end": end} for version, start, end in spans],
        "finish_reason": finish,
        "cached_tokens": cached,
    }
    if top:
        meta["output_top_logprobs"] = [
            [(other["logprob"], other["token_id"]) for other in sorted(token["top_logprobs"], key=lambda t: -t["logprob"])[:top]]
            for token in tokens
        ]
    return {"meta_info": meta}


def _refused(params: SamplingParams, text: str) -> EngineError:
    if params.constraint is not None:  # other fields are checked before
        return InvalidConstraint(f"vLLM can't apply the constraint: {_excerpt(text)}")
    return EngineFailed(f"vLLM refused the request: {_excerpt(text)}")


def _excerpt(text: str) -> str:
    return " ".join(text.split())[:_EXCERPT]


def _sizes(folder: str) -> dict[str, Any]:
    """What tells models apart, from the config of a folder; empty if it is not on this host."""
    path = Path(folder) / "config.json"
    if not folder or not path.is_file():
        return {}
    config = json.loads(path.read_text())
    return {name: config.get(name) for name in ("architectures", "vocab_size", "hidden_size", "num_hidden_layers")}
