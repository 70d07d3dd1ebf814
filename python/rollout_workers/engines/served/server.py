"""What an engine needs of the process that has its model."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from rollout_workers.engines.base import GroupRequest, SamplingParams
from rollout_workers.engines.errors import EngineError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Asked:
    """One sample to stream. continued: what was sampled of it before. room: most tokens that the
    context leaves after both. end_ids: of the model. salt: requests with another one share no
    keys and values."""

    prompt: list[int]
    continued: list[int]
    params: SamplingParams
    seed: int
    room: int
    end_ids: tuple[int, ...]
    salt: str


@dataclass(frozen=True, slots=True)
class Scored:
    """Logprobs of each token of a prompt but the first, and the most likely tokens at each of these
    positions, best first: (logprob, id)."""

    logprobs: list[float]
    top: list[list[tuple[float, int]]]


class Server(Protocol):
    """Coroutines run in the server's thread, through ``call``. Calls may be repeated."""

    def call(self, coroutine: Coroutine[Any, Any, T], /) -> Future[T]:
        """Raises ``EngineClosed``, ``EngineFailed``."""
        ...

    def on_failure(self, listener: Callable[[str], None], /) -> None:
        """Call ``listener`` in the thread when the model's process has ended."""
        ...

    def refusal(self, request: GroupRequest, /) -> EngineError | None:
        """Why the server can't sample a request, or None."""
        ...

    def stream(self, asked: Asked, /) -> AsyncGenerator[Mapping[str, Any], None]:
        """The chunks of a sample in the form of SGLang, see ``Parts``. A pause does not end the
        stream. Closing the iterator aborts the sample."""
        ...

    async def score(self, prompt: list[int], top: int, /) -> Scored:
        """Raises ``EngineFailed``."""
        ...

    async def pause(self) -> None:
        """Return once no forward pass runs. Samples continue after ``resume``."""
        ...

    async def resume(self) -> None: ...

    async def load(self, folder: str, version: str, /) -> None:
        """Load the weights of a folder while paused, and drop keys and values of the former ones.
        Raises ``EngineFailed``."""
        ...

    async def release(self) -> None:
        """Release the memory of weights and KV while paused."""
        ...

    async def restore(self) -> None: ...

    def digest(self, dtypes: Mapping[str, str], /) -> str:
        """The root of the digest over the tensors in the model, in these dtypes; blocks. Raises
        ``ModelUnsupported`` if a tensor can't be read back."""
        ...

    def close(self) -> None:
        """End what was started for the engine; blocks."""
        ...
