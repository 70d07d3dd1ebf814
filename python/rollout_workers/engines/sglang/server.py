"""Runs ``sgl.Engine`` in a thread with an event loop, and guards its calls.

SGLang's scheduler and detokenizer are child processes; they end with this process, or when the
server closes.
"""
# pyright: reportMissingImports=false

from __future__ import annotations

import asyncio
import atexit
import contextlib
import importlib.util
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from rollout_workers.engines.base import GroupRequest
from rollout_workers.engines.errors import (
    EngineClosed,
    EngineError,
    EngineFailed,
    InvalidConstraint,
    InvalidParameters,
    ModelUnsupported,
)
from rollout_workers.engines.served.server import Asked, Scored
from rollout_workers.engines.sglang.sampling import engine_params, needs_penalties

T = TypeVar("T")
log = logging.getLogger(__name__)

_FLUSH_SECONDS = 10.0


class Server:
    """One ``sgl.Engine``. Coroutines run in its thread, through ``call``."""

    def __init__(self, arguments: Mapping[str, Any], *, threads: int = 0) -> None:
        """Start SGLang and wait until it serves; blocks. arguments: of ``ServerArgs``. threads: CPU
        threads of each process; 0: the library's default. Raises ``ModelUnsupported``."""
        if importlib.util.find_spec("sglang") is None:
            raise ModelUnsupported(
                f"SGLang is not installed for {sys.executable}: run `make engine-sglang` and set "
                '`engine.python = ".tools/sglang/bin/python"`'
            )
        self.failure: str | None = None
        self._paused = self._released = False
        self._on_failure: list[Callable[[str], None]] = []
        self._reading = threading.Lock()
        self._loop = asyncio.new_event_loop()
        ready: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(dict(arguments), threads, ready), name="sglang", daemon=True)
        self._thread.start()
        try:
            ready.result()
        except BaseException as error:
            self._thread.join()
            raise ModelUnsupported(f"SGLang can't serve {arguments.get('model_path')}: {error}") from error
        atexit.register(self.close)

    @property
    def paused(self) -> bool:
        return self._paused

    @property
    def released(self) -> bool:
        """Whether memory was released and not resumed."""
        return self._released

    def call(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine in the thread. Raises ``EngineClosed``, ``EngineFailed``."""
        if self.failure is not None or not self._thread.is_alive():
            coroutine.close()
            self.check()
            raise EngineClosed("the engine was shut down")
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def check(self) -> None:
        """Raise ``EngineFailed`` if a process of SGLang has ended."""
        if self.failure is not None:
            raise EngineFailed(self.failure)

    def on_failure(self, listener: Callable[[str], None]) -> None:
        """Call ``listener`` in the thread when a process of SGLang has ended."""
        self._on_failure.append(listener)

    @property
    def engine(self) -> Any:
        return self._engine

    @property
    def _manager(self) -> Any:
        return self._engine.tokenizer_manager

    def refusal(self, request: GroupRequest) -> EngineError | None:
        if len(request.continued) and request.params.constraint is not None:
            return InvalidParameters(
                f"request {request.request_id}: SGLang can't continue a sample with a constraint; sample it again from its prompt"
            )
        return None

    async def stream(self, asked: Asked) -> AsyncGenerator[dict[str, Any], None]:
        """The chunks of one request, each with new tokens only. Closing the iterator aborts it."""
        wanted: dict[str, Any] = {
            "input_ids": asked.prompt + asked.continued,
            "sampling_params": engine_params(
                asked.params,
                asked.seed,
                room=asked.room,
                prompt=len(asked.prompt),
                continued=len(asked.continued),
                end_ids=asked.end_ids,
            ),
            "return_logprob": True,
            "top_logprobs_num": asked.params.top_logprobs,
            "cache_salt": asked.salt,
        }
        if needs_penalties(asked.params):
            from rollout_workers.engines.sglang.scheduler import Penalties

            wanted["custom_logit_processor"] = Penalties.to_str()
        chunks = await self._engine.async_generate(**wanted, rid=uuid.uuid4().hex, stream=True)
        async with contextlib.aclosing(chunks):
            async for chunk in chunks:
                finish = chunk["meta_info"].get("finish_reason") or {}
                if finish.get("status_code") == 400 and asked.params.constraint is not None:  # other fields are checked before
                    raise InvalidConstraint(f"SGLang can't apply the constraint: {finish.get('message')}")
                yield chunk

    async def score(self, prompt: list[int], top: int) -> Scored:
        """Score a prompt. Raises ``EngineFailed``."""
        try:
            found = await self._engine.async_generate(
                input_ids=prompt, sampling_params={"max_new_tokens": 0, "temperature": 0}, return_logprob=True,
                logprob_start_len=0, top_logprobs_num=top,
            )  # fmt: skip
        except ValueError as error:
            raise EngineFailed(f"SGLang did not score the prompt: {error}") from error
        meta = found["meta_info"]
        rows = meta["input_top_logprobs"][1:] if top else ()
        return Scored(
            [pair[0] for pair in meta["input_token_logprobs"][1:]], [[(pair[0], pair[1]) for pair in row] for row in rows]
        )

    async def pause(self) -> None:
        """Retract running requests and hold all of them. Returns once no forward pass runs."""
        if self._paused:
            return
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        await self._manager.pause_generation(PauseGenerationReqInput(mode="retract"))
        self._paused = True
        await self._manager.get_internal_state()  # answered after the pause, which has no answer

    async def resume(self) -> None:
        """Undo ``pause``."""
        if not self._paused:
            return
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput

        await self._manager.continue_generation(ContinueGenerationReqInput())
        self._paused = False

    async def load(self, folder: str, version: str) -> None:
        """Load the weights of a folder while paused. Raises ``EngineFailed``; the former weights
        are then restored."""
        from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput

        wanted = UpdateWeightFromDiskReqInput(model_path=folder, weight_version=version, flush_cache=False)
        success, message, _ = await self._manager.update_weights_from_disk(wanted)
        if not success:
            raise EngineFailed(f"SGLang refused the weights in {folder}: {message}")
        await self.flush()

    async def load_tensors(self, tensors: list[tuple[str, Any]]) -> None:
        """Load some tensors, by Hugging Face name, once no request is running. The cache keeps
        their old KV until ``flush``. Raises ``EngineFailed``."""
        from sglang.srt.managers.io_struct import (
            BeginWeightUpdateReqInput,
            EndWeightUpdateReqInput,
            UpdateWeightsFromTensorReqInput,
        )

        serialized = self._engine._serialize_tensors_per_rank(tensors, None)
        wanted = UpdateWeightsFromTensorReqInput(serialized_named_tensors=serialized, flush_cache=False)
        for call, request in (
            (self._manager.begin_weight_update, BeginWeightUpdateReqInput()),
            (self._manager.update_weights_from_tensor, wanted),
            (self._manager.end_weight_update, EndWeightUpdateReqInput()),
        ):
            success, message = await call(request, None)
            if not success:
                raise EngineFailed(f"SGLang refused a bucket of {len(tensors)} tensors: {message}")

    async def flush(self) -> None:
        """Drop the KV of finished and retracted requests. Requests that just ended may still count
        as running, so it is repeated. Raises ``EngineFailed``."""
        ends = time.monotonic() + _FLUSH_SECONDS
        while not (await self._manager.flush_cache()).success:
            if time.monotonic() > ends:
                raise EngineFailed("SGLang did not flush its cache: requests are still running; pause the engine first")
            await asyncio.sleep(0.01)

    async def release(self) -> None:
        """Release the memory of weights and KV. The engine must be paused: SGLang fails if a
        request is running."""
        if self._released:
            return
        from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput

        await self.flush()
        await self._manager.release_memory_occupation(ReleaseMemoryOccupationReqInput(), None)
        self._released = True

    async def restore(self) -> None:
        """Undo ``release``; SGLang fails if nothing was released."""
        if not self._released:
            return
        from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput

        await self._manager.resume_memory_occupation(ResumeMemoryOccupationReqInput(), None)
        self._released = False

    def digest(self, dtypes: Mapping[str, str]) -> str:
        """The root of the digest over the tensors in the model, in these dtypes; blocks. Raises
        ``ModelUnsupported`` if a tensor can't be read back."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "digest"
            try:
                self.rpc("rollout_digest", path=str(path), dtypes=dict(dtypes))
            except EngineFailed as error:
                raise ModelUnsupported(
                    f'the weights can\'t be read back from SGLang: {error}; set `weights.verify = "none"` to train without '
                    "verification, or use another engine"
                ) from error
            return path.read_text()

    def rpc(self, method: str, **parameters: Any) -> None:
        """Call a method of each rank's scheduler between two steps; blocks. Raises
        ``EngineFailed``."""
        self.check()
        with self._reading:
            try:
                self._engine.collective_rpc(method, **parameters)
            except AssertionError as error:
                raise EngineFailed(str(error)) from error

    def close(self) -> None:
        """End SGLang's processes; may be repeated."""
        atexit.unregister(self.close)
        if self._thread.is_alive() and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    def _run(self, arguments: dict[str, Any], threads: int, ready: Future[None]) -> None:
        asyncio.set_event_loop(self._loop)
        others = {process.pid for process in multiprocessing.active_children()}
        try:
            self._engine = _launch(arguments, threads)
        except BaseException as error:
            _end_children({process.pid for process in multiprocessing.active_children() if process.pid} - others)
            ready.set_exception(error)
            return
        watch = self._loop.create_task(self._watch())
        ready.set_result(None)
        try:
            self._loop.run_forever()
        finally:
            watch.cancel()
            _shut_down(self._engine, self._loop)

    async def _watch(self) -> None:
        """Notice that a process of SGLang has ended."""
        import psutil

        processes = [psutil.Process(pid) for pid in self._engine.get_all_child_pids()]
        while True:
            for process in processes:
                if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
                    self.failure = f"a process of SGLang ({process.pid}) ended: read the worker's log, and restart the worker"
                    log.error(self.failure)
                    for listener in self._on_failure:
                        listener(self.failure)
                    return
            await asyncio.sleep(0.5)


def _launch(arguments: dict[str, Any], threads: int) -> Any:
    """Start ``sgl.Engine`` without its changes to this process: the policy of event loops, signals,
    logging, and a clean-up at exit, which ends all children of the process."""
    environment = {"HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "PASSIVE", "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}
    if arguments.get("device") == "cpu":
        environment["SGLANG_USE_CPU_ENGINE"] = "1"
    if threads:
        environment["OMP_NUM_THREADS"] = str(threads)
    os.environ.update(environment)
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    keep_policy, asyncio.set_event_loop_policy = asyncio.set_event_loop_policy, lambda policy: None
    try:
        from sglang.srt.entrypoints.engine import Engine

        from rollout_workers.engines.sglang import scheduler

        class Quiet(Engine):
            run_scheduler_process_func = staticmethod(scheduler.run_scheduler)
            run_detokenizer_process_func = staticmethod(scheduler.run_detokenizer)

        engine = Quiet(**arguments)
    finally:
        asyncio.set_event_loop_policy = keep_policy
        root.handlers[:] = handlers
        root.setLevel(level)
    atexit.unregister(engine.shutdown)
    watchdog = getattr(engine.tokenizer_manager, "_subprocess_watchdog", None)
    if watchdog is not None:
        watchdog.stop()
    return engine


def _shut_down(engine: Any, loop: asyncio.AbstractEventLoop) -> None:
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    if tasks:
        loop.run_until_complete(asyncio.wait(tasks, timeout=5))
    _end_children(set(engine.get_all_child_pids()))
    manager = engine.tokenizer_manager
    for socket in (manager.recv_from_detokenizer, manager.send_to_scheduler, engine.send_to_rpc):
        # A context that is collected later waits for messages to the ended processes, without a
        # limit.
        socket.context.destroy(linger=0)
    loop.close()


def _end_children(pids: set[int]) -> None:
    """End these processes and their children, and wait for them."""
    import psutil

    processes: list[psutil.Process] = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            processes += [process, *process.children(recursive=True)]
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)
    psutil.wait_procs(processes, timeout=10)
