"""Client of an OpenAI-compatible endpoint for logprobs: the teacher of on-policy distillation.
Imports no torch.

Usage: ``TeacherEndpoint("http://127.0.0.1:8000/v1", "teacher",
protocol="prompt_logprobs").logprobs([5, 9, 3, 7], prompt_tokens=2)`` returns the logprobs of the
tokens 3 and 7.

The request contains token ids, so the server tokenizes nothing. The tokens of the answer are
compared with the request, because a server that adds a beginning-of-sequence token, or has another
vocabulary, would return wrong logprobs.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any, Literal, cast

import requests

from rollout.errors import RolloutError

__all__ = [
    "Pieces",
    "TeacherBadAnswer",
    "TeacherBusy",
    "TeacherEndpoint",
    "TeacherError",
    "TeacherRefused",
    "TeacherTimeout",
    "TeacherTokensDiffer",
    "TeacherUnreachable",
]

Pieces = Callable[[int], Sequence[str]]
"""The possible texts of a token of the model."""
Protocol = Literal["echo", "prompt_logprobs"]
_EXCERPT = 300


class TeacherError(RolloutError):
    """Base of the errors of a teacher. ``again``: whether a retry may succeed."""

    again = False


class TeacherUnreachable(TeacherError):
    """The server is unreachable, or has an internal error."""

    reason = "TEACHER_UNREACHABLE"
    again = True


class TeacherBusy(TeacherError):
    """The server limits the rate of requests (HTTP 429). ``after``: when to ask again, in seconds;
    from its ``Retry-After`` if it has one."""

    reason = "TEACHER_BUSY"
    again = True
    after: float = 5.0


class TeacherTimeout(TeacherError):
    """The call timed out."""

    reason = "TEACHER_TIMEOUT"
    again = True


class TeacherRefused(TeacherError):
    """The server rejected the request: a wrong key or model, or an unsupported request."""

    reason = "TEACHER_REFUSED"


class TeacherBadAnswer(TeacherError):
    """The answer has no logprobs."""

    reason = "TEACHER_BAD_ANSWER"


class TeacherTokensDiffer(TeacherError):
    """The answer has other tokens than the request."""

    reason = "TEACHER_TOKENS_DIFFER"


class TeacherEndpoint:
    """A client. Calls block. It is safe for concurrent use."""

    def __init__(
        self, base_url: str, model: str, *, api_key: str = "", protocol: str = "echo", timeout_seconds: float = 60.0,
        pieces: Pieces | None = None,
    ) -> None:  # fmt: skip
        """base_url: of the API. api_key: the key. pieces: the texts of a token, to compare tokens
        if the answer has no ids."""
        self._url = base_url.rstrip("/") + "/completions"
        self._model, self._key, self._protocol = model, api_key, protocol
        self._timeout, self._pieces = timeout_seconds, pieces
        self._local = threading.local()
        self._sessions: list[requests.Session] = []  # of all threads

    def close(self) -> None:
        """Close idle connections; a connection in use closes after its call. Idempotent."""
        for session in self._sessions:
            session.close()

    def logprobs(self, token_ids: Sequence[int], prompt_tokens: int) -> list[float]:
        """The teacher's logprob of each token from ``prompt_tokens`` (at least 1) on, given the
        tokens before it, at temperature 1. Raises :class:`TeacherError`."""
        if not 1 <= prompt_tokens <= len(token_ids):
            raise ValueError(f"prompt_tokens is {prompt_tokens}, but must be from 1 to {len(token_ids)}")
        body: dict[str, Any] = {"model": self._model, "prompt": list(token_ids), "max_tokens": 1, "temperature": 1.0}
        body |= {"prompt_logprobs": 1} if self._protocol == "prompt_logprobs" else {"echo": True, "logprobs": 1}
        answer = self._post(body)
        try:
            choice = answer["choices"][0]
            given = self._by_id(choice, token_ids) if self._protocol == "prompt_logprobs" else self._by_text(choice, token_ids)
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise TeacherBadAnswer(
                f"the answer of {self._url} has no log-probabilities of the prompt ({self._protocol})",
                fix='try the other `protocol`: "echo" or "prompt_logprobs"',
            ) from error
        found = given[prompt_tokens:]
        for place, value in enumerate(found, prompt_tokens):
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value > 1e-3:
                raise TeacherBadAnswer(f"the logprob of token {place} is {value!r}")
        return [float(cast(float, value)) for value in found]

    def _by_id(self, choice: dict[str, Any], ids: Sequence[int]) -> list[object]:
        """The format of vLLM: for each token of the prompt a mapping from ids to logprobs, which
        includes the token."""
        entries: list[dict[str, dict[str, Any]] | None] = choice["prompt_logprobs"]
        self._check_count(len(entries), ids, more=0)
        for place, (entry, token) in enumerate(zip(entries, ids, strict=True)):
            if entry is not None and str(token) not in entry:
                raise self._differ(place, token, ", ".join(entry))
        return [None if entry is None else entry[str(token)]["logprob"] for entry, token in zip(entries, ids, strict=True)]

    def _by_text(self, choice: dict[str, Any], ids: Sequence[int]) -> list[object]:
        """The format of OpenAI: tokens as texts, first those of the prompt, then the sampled
        one."""
        texts: list[str] = choice["logprobs"]["tokens"]
        values: list[object] = choice["logprobs"]["token_logprobs"]
        self._check_count(len(texts), ids, more=1)
        if len(values) != len(texts):
            raise TeacherBadAnswer(f"the answer has {len(texts)} tokens and {len(values)} logprobs")
        for place, (text, token) in enumerate(zip(texts, ids, strict=False)):
            if not self._same(text, token):
                raise self._differ(place, token, repr(text))
        return values[: len(ids)]

    def _check_count(self, count: int, ids: Sequence[int], more: int) -> None:
        if not len(ids) <= count <= len(ids) + more:
            raise TeacherTokensDiffer(
                f"the request had {len(ids)} tokens, but the answer of {self._url} has {count}",
                fix="configure the server not to add a beginning-of-sequence token to the prompt",
            )

    def _same(self, text: str, token: int) -> bool:
        if text.startswith("token_id:"):
            return text == f"token_id:{token}"
        if self._pieces is None or "�" in text or text.startswith("bytes:"):  # a part of a character
            return True
        names = [_plain(name) for name in self._pieces(token)]
        return _plain(text) in names or any("�" in name for name in names)

    def _differ(self, place: int, token: int, theirs: str) -> TeacherTokensDiffer:
        ours = f" ({', '.join(sorted({repr(name) for name in self._pieces(token)}))})" if self._pieces else ""
        return TeacherTokensDiffer(
            f"token {place} of the request is {token}{ours}, but the answer has {theirs}",
            fix="use a teacher with the same tokenizer",
        )

    def _post(self, body: dict[str, Any]) -> dict[str, Any]:
        try:
            response = self._session().post(self._url, json=body, timeout=self._timeout)
            if not response.ok:
                raise self._refused(response)
            answer: object = response.json()
        except requests.Timeout as error:
            raise self._late() from error
        except requests.JSONDecodeError as error:
            raise TeacherBadAnswer(f"the answer of {self._url} is not JSON: {error}", fix="correct `base_url`") from error
        except requests.RequestException as error:
            raise TeacherUnreachable(
                f"can't reach the teacher at {self._url}: {error}", fix="start its server, or correct `base_url`"
            ) from error
        if not isinstance(answer, dict):
            raise TeacherBadAnswer(f"the answer of {self._url} is not a JSON object", fix="correct `base_url`")
        return cast(dict[str, Any], answer)

    def _session(self) -> requests.Session:
        """The session of this thread; its connection stays open between calls."""
        held = getattr(self._local, "session", None)
        if held is None:
            held = self._local.session = requests.Session()
            self._sessions.append(held)
            if self._key:
                held.headers["Authorization"] = f"Bearer {self._key}"
        return held

    def _late(self) -> TeacherTimeout:
        return TeacherTimeout(
            f"the teacher at {self._url} took longer than {self._timeout:g} s",
            fix="raise `timeout_seconds`, or lower `concurrency`",
        )

    def _refused(self, response: requests.Response) -> TeacherError:
        shown = " ".join(response.text.split())[:_EXCERPT]
        message = f"the teacher at {self._url} answers {response.status_code}: {shown}"
        if response.status_code == 429:
            busy = TeacherBusy(message, fix="lower `concurrency`, raise the limit of the server, or raise `retries`")
            after = response.headers.get("Retry-After", "")
            busy.after = float(after) if after.isdecimal() else busy.after  # a date is as rare as it is ambiguous
            return busy
        if response.status_code == 408 or response.status_code >= 500:
            return TeacherUnreachable(message, fix="see the server's log; lower `concurrency` if it is overloaded")
        if response.status_code in (401, 403):
            return TeacherRefused(message, fix="set `api_key` to a reference to its key")
        return TeacherRefused(message, fix="correct `base_url`, `model` or `protocol`")


def _plain(text: str) -> str:
    """A token's text without marks for white space, which differ between servers."""
    return text.replace("▁", " ").replace("Ġ", " ").replace("Ċ", "\n").strip()
