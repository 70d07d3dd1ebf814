"""A chat model behind an OpenAI-compatible API, for environments: a user simulator, an opponent, or
a frozen model that ``rollout serve`` serves. Imports no torch.

Example, in an environment with ``args = { url = "http://127.0.0.1:8000/v1", model = "user" }``::

    class Shop(SingleEpisode):
        def __init__(self, url, model):
            self.user = Endpoint(url, model, api_key="env:SHOP_KEY", temperature=0)

        async def step(self, turn):
            said = await self.sessions.open(self.user).chat(turn.text)
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import requests

from rollout.environment import Message, Reply, SessionError, calls_of
from rollout.secret import read_secret
from rollout.waiting import waits_for

_EXCERPT = 300
_LONGEST_PAUSE = 10.0
_THREADS = ThreadPoolExecutor(64, "endpoint")
"""Of all endpoints of the process, because each episode may have its own: the calls at the same
time; others wait."""
_LOCAL = threading.local()


class EndpointUnreachable(SessionError):
    """The server is unreachable, overloaded, or has an internal error, also after retries."""

    reason = "CHILD_UNREACHABLE"


class EndpointTimeout(SessionError):
    """The call and its retries took longer than ``timeout_seconds``."""

    reason = "CHILD_TIMEOUT"


class EndpointRefused(SessionError):
    """The server rejected the request: a wrong key or model, or an unsupported request."""

    reason = "CHILD_REFUSED"


class EndpointBadAnswer(SessionError):
    """The answer is not one of OpenAI's chat completions."""

    reason = "CHILD_BAD_ANSWER"


class Endpoint:
    """A client. Sessions may share one, and may call it at the same time."""

    def __init__(self, url: str, model: str, *, api_key: str = "", timeout_seconds: float = 60.0, **parameters: Any) -> None:
        """url: of the API, which usually ends with ``/v1``. api_key: a reference to the key,
        ``env:NAME`` or ``file:PATH``. timeout_seconds: of one call with its retries. parameters:
        of each request, for example ``temperature`` and ``max_tokens``. Raises
        ``SecretError``."""
        self._url = url.rstrip("/") + "/chat/completions"
        self._body: dict[str, Any] = {"model": model, **parameters}
        self._headers = {"Authorization": f"Bearer {key}"} if (key := read_secret(api_key, "`api_key`")) else {}
        self._timeout = timeout_seconds

    async def chat(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> Reply:
        """The model's answer to a conversation. A server that is unreachable or overloaded is asked
        again until ``timeout_seconds``. Raises ``SessionError``."""
        body = self._body | {"messages": list(messages)} | ({"tools": list(tools)} if tools else {})
        loop, ends, pause = asyncio.get_running_loop(), time.monotonic() + self._timeout, 0.25
        last = SessionError(f"the model at {self._url} has not answered", fix="see the log of its server")
        while True:
            with waits_for(last.message, last.fix):
                try:
                    return _reply(await loop.run_in_executor(_THREADS, self._post, body, ends), self._url)
                except EndpointUnreachable as error:
                    if time.monotonic() + pause >= ends:
                        raise
                    last = error
            with waits_for(last.message, last.fix):
                await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _post(self, body: Mapping[str, Any], ends: float) -> Any:
        seconds = max(ends - time.monotonic(), 0.001)
        try:
            response = _connections().post(self._url, json=body, headers=self._headers, timeout=seconds)
            if not response.ok:
                raise self._refused(response)
            return response.json()
        except requests.JSONDecodeError as error:
            raise EndpointBadAnswer(f"the answer of {self._url} is not JSON: {error}", fix="correct the URL") from error
        except requests.Timeout as error:
            raise EndpointTimeout(
                f"the model at {self._url} took longer than {self._timeout:g} s",
                fix="raise `timeout_seconds`, and `environment.turn_timeout_seconds` above it",
            ) from error
        except requests.RequestException as error:
            raise EndpointUnreachable(
                f"can't reach the model at {self._url}: {error}", fix="start its server, or correct the URL"
            ) from error

    def _refused(self, response: requests.Response) -> SessionError:
        shown = " ".join(response.text.split())[:_EXCERPT]
        message = f"the model at {self._url} answers {response.status_code}: {shown}"
        if response.status_code in (408, 409, 425, 429) or response.status_code >= 500:
            return EndpointUnreachable(message, fix="see the server's log; it may be overloaded")
        if response.status_code in (401, 403):
            return EndpointRefused(message, fix="set `api_key` to a reference to its key, such as `env:NAME`")
        return EndpointRefused(message, fix="correct the URL, the model, or the parameters")


def _connections() -> requests.Session:
    """Those of this thread, which stay open between calls."""
    if not hasattr(_LOCAL, "session"):
        _LOCAL.session = requests.Session()
    return _LOCAL.session


def _reply(answer: Any, url: str) -> Reply:
    try:
        choice = answer["choices"][0]
        message = cast(dict[str, Any], choice["message"])
        text, calls = str(message.get("content") or ""), calls_of(message)
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise EndpointBadAnswer(f"the answer of {url} has no message: {str(answer)[:_EXCERPT]}", fix="correct the URL") from error
    reasoning = str(message.get("reasoning_content") or message.get("reasoning") or "")
    return Reply(-1, text, truncated=choice.get("finish_reason") == "length", content=text, reasoning=reasoning, tool_calls=calls)
