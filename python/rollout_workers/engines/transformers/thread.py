"""The thread that owns a decoder. It runs turns while there is work, and calls from other threads
between two turns."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any, Generic, Protocol, TypeVar

import torch

from rollout_workers.engines.errors import EngineClosed

log = logging.getLogger(__name__)
T = TypeVar("T")


class Turns(Protocol):
    """A decoder, as the thread uses it."""

    def has_work(self) -> bool: ...

    def turn(self) -> None: ...

    def fail(self, cause: Exception) -> None: ...


D = TypeVar("D", bound=Turns)


class DecodingThread(Generic[D]):
    """Runs a decoder. All access to the decoder goes through ``call``. ``flush`` runs after every
    turn and call."""

    def __init__(self, build: Callable[[], D], flush: Callable[[], None], threads: int | None) -> None:
        """Start the thread, build the decoder in it, and wait for that. Raises the exception of
        ``build``."""
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._gate = threading.Lock()
        self._closed = False
        self._flush = flush
        built: Future[D] = Future()
        self._thread = threading.Thread(target=self._run, args=(build, built, threads), name="decoding", daemon=True)
        self._thread.start()
        self.decoder = built.result()

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run ``function`` in the thread between two turns. Raises ``EngineClosed``."""
        future: Future[T] = Future()
        with self._gate:
            self.check_open()
            self._calls.put((future, function))
        return future

    def check_open(self) -> None:
        """Raise ``EngineClosed`` if the thread was closed."""
        if self._closed:
            raise EngineClosed("the engine was shut down")

    def close(self) -> None:
        """Run the pending calls, then end the thread and wait for it. Decoding stops at once."""
        with self._gate:
            if not self._closed:
                self._closed = True
                self._calls.put(None)
        self._thread.join()

    def _run(self, build: Callable[[], D], built: Future[D], threads: int | None) -> None:
        if threads is not None:
            torch.set_num_threads(threads)
        with torch.inference_mode():
            try:
                decoder = build()
            except BaseException as error:
                built.set_exception(error)
                return
            built.set_result(decoder)
            while self._answer_calls(wait=not decoder.has_work()):
                if decoder.has_work():
                    try:
                        decoder.turn()
                    except Exception as error:
                        log.exception("a decoding turn failed")
                        decoder.fail(error)
                    self._flush()

    def _answer_calls(self, wait: bool) -> bool:
        """Run the pending calls, or wait for one. Returns whether to continue."""
        try:
            while (call := self._calls.get(block=wait)) is not None:
                future, function = call
                wait = False
                if not future.set_running_or_notify_cancel():  # the caller has cancelled
                    continue
                try:
                    result = function()
                except BaseException as error:
                    self._flush()
                    future.set_exception(error)
                else:
                    self._flush()
                    future.set_result(result)
            return False
        except Empty:
            return True
