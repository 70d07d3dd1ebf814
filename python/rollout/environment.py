"""The protocol of environments: batched and asynchronous. Imports no torch.

    reset(tasks) -> per task, what its episodes begin with
    step(turns)  -> per turn, an Observation (the episode continues), a Result (it has ended), or
                    ChildTurns (the same turn comes again, with the replies of child sessions)
    close(..)    -> these episodes are over or abandoned

A *task* is one prompt group: its samples share the first observation, so an engine runs the prompt
once. From the second turn on, each sample is a separate episode. A single-turn environment
answers the first ``step`` with Results; one with tools answers with Observations that hold the
tool's output. ``rollout_testing.envtest`` checks an implementation.

An environment of a user's is a class in a file, named in the configuration as ``file.py:Class``. It
is written for one episode, or it implements ``Environment`` itself::

    class Guess(SingleEpisode):
        async def reset(self, task):
            self.secret = json.loads(task.row_json)["secret"]
            return "Guess a number from 0 to 9."

        async def step(self, turn):
            if turn.text.strip() == str(self.secret):
                return Result(reward=1.0)
            return "Wrong. Guess again."
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, Self, TypeAlias, cast, overload, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from rollout.errors import RolloutError
from rollout.plugin import Step

Outcome = Literal["completed", "truncated", "aborted", "infra_failed"]
Message: TypeAlias = Mapping[str, Any]
"""A chat message as in OpenAI's API: ``role``, ``content``, and for tools ``tool_calls`` or
``tool_call_id``. An image is a content part with its URL or content id."""
_NO_IDS = np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True)
class Task:
    """One prompt group, or the missing part of it.

    key: unique among the open tasks. row_json: the dataset's row. samples: numbers of the requested
    samples of the group, with the seed of each.
    """

    key: str
    row_json: bytes
    samples: tuple[int, ...]
    seeds: tuple[int, ...]
    row: int = 0

    @property
    def seed(self) -> int:
        """A seed that all samples and attempts of the row share, 63 bits."""
        digest = hashlib.sha256(b"rollout.task.v1" + self.row.to_bytes(8, "little") + self.row_json).digest()
        return int.from_bytes(digest[:8], "little") & (1 << 63) - 1


@dataclass(frozen=True, slots=True, eq=False)
class Observation:
    """What the policy reads next. It is not trained on.

    One of: messages, which the chat template renders; tokens (int32[N]); or a text alone, which is
    a message of the user with ``model.chat_template = true`` and is otherwise appended as it is.
    text: of tokens, the same as text, for people and rewards.

    tools: of a first observation with messages or a text, the functions that the policy may call in
    this episode, as in OpenAI's API. reward, metrics: of the turn before it. A metric of several
    turns is summed. tool_seconds: how long each tool call of that turn took, in the order of the
    calls; empty if it is not known.
    """

    token_ids: NDArray[np.int32] = field(default_factory=lambda: _NO_IDS)
    text: str = ""
    messages: tuple[Message, ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
    reward: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    tool_seconds: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a function in the policy's answer. arguments: an object; empty if ``error`` says
    why the text in ``raw`` is not one."""

    id: str
    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])
    error: str = ""
    raw: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class ChildTurn:
    """What a child session reads before its next turn.

    child: number of the session in its episode, from 0; a new number opens a session. observation:
    as of an episode; only the first one of a session names tools. model: who answers. With
    ``policy`` the session becomes a trajectory of the same sample.
    """

    child: int
    observation: Observation
    model: str = "policy"


@dataclass(frozen=True, slots=True)
class ChildTurns:
    """Asks child sessions for their next turns, at most one of each. They are sampled together, and
    the environment is called with the same turn again, which then has their replies."""

    turns: tuple[ChildTurn, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Reply:
    """A turn of a child session: the fields are those of ``Turn``. error: machine-readable reason
    why the session did not answer, or empty. message: of the error, one line."""

    child: int
    text: str = ""
    token_ids: NDArray[np.int32] = field(default_factory=lambda: _NO_IDS)
    truncated: bool = False
    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    error: str = ""
    message: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """One answer of the policy. sample: number in the task. number: of the turn, from 0. text:
    without special tokens and stop text.

    prompt, prompt_ids: text and tokens (int32[N]) of the first observation. context_ids: int32[C],
    all tokens of the episode before the answer; empty in another process than the worker's.
    truncated: whether the answer ended at the token limit.

    content, reasoning, tool_calls: the parts of the answer in an episode of messages; in other
    episodes content is the text.

    replies: of the child sessions that the environment asked after this turn, in the order in which
    it asked; empty in the first call with the turn.
    """

    task: Task
    sample: int
    number: int
    prompt: str
    token_ids: NDArray[np.int32]
    text: str
    truncated: bool
    prompt_ids: NDArray[np.int32] = field(default_factory=lambda: _NO_IDS)
    context_ids: NDArray[np.int32] = field(default_factory=lambda: _NO_IDS, kw_only=True)
    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    replies: tuple[Reply, ...] = ()

    @property
    def seed(self) -> int:
        """The seed of the sample."""
        return self.task.seeds[self.task.samples.index(self.sample)]


@dataclass(frozen=True, slots=True)
class Result:
    """The end of an episode. reward, metrics: only for completed and truncated episodes. reason:
    for the other outcomes. message: what the worker logs of a failure, one line.

    reward: of the last turn and of the episode, in addition to the rewards of earlier observations.
    turn_rewards: of each turn, for an environment that knows them only at the end; empty, or one
    per turn. They are added to those of the observations. ``environment.credit`` says which tokens
    a reward counts for.

    token_rewards: one per token of the last turn, or empty. teacher_logprobs: one per token of the
    episode after the first observation, or empty: the log-probability that a teacher gives it after
    the tokens before it. steps: rewards of parts of the last turn, which become ``token_rewards``
    before an environment returns the result (``process_reward.spread``). child_rewards: of child
    sessions by number; the others have the reward of the episode.
    """

    reward: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    outcome: Outcome = "completed"
    reason: str = ""
    token_rewards: tuple[float, ...] = ()
    teacher_logprobs: tuple[float, ...] = ()
    steps: tuple[Step, ...] = ()
    turn_rewards: tuple[float, ...] = ()
    message: str = ""
    child_rewards: Mapping[int, float] = field(default_factory=dict[int, float])


Answer: TypeAlias = Observation | Result | ChildTurns
"""What an environment answers to a turn."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A task that can't start because its row is invalid. All of its samples end as INFRA_FAILED
    with this reason."""

    reason: str
    message: str


class Environment(Protocol):
    """Runs the episodes of tasks. Calls may overlap. An exception fails only the turns or tasks of
    that call. A call that takes longer than ``environment.turn_timeout_seconds`` is cancelled, and
    its episodes are closed.

    An environment with ``batched = False`` is called with one task or turn at a time, so that a
    slow episode delays no other. One with ``waits_for_siblings = True`` may keep a step waiting
    until the other samples of the task have acted, which takes as long as they are sampled: its
    steps have no deadline; those of the episode and the group end them.
    """

    async def reset(self, tasks: Sequence[Task]) -> Sequence[Observation | Refusal]:
        """The first observation of each task, in order."""
        ...

    async def step(self, turns: Sequence[Turn]) -> Sequence[Answer]:
        """The answer to each turn, in order."""
        ...

    async def close(self, episodes: Sequence[tuple[str, int]]) -> None:
        """Release these episodes (task key, sample). Idempotent; unknown episodes are ignored.
        Called for every episode that did not end with a result of ``step``, or that failed."""
        ...


@runtime_checkable
class StatefulEnvironment(Protocol):
    """An environment whose open episodes can be saved and restored."""

    def state_dict(self) -> Mapping[str, Any]:
        """The open episodes as plain data, at most 16 MiB as JSON. Called between turns: not during
        other calls of the environment."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the open episodes by saved ones."""
        ...


@runtime_checkable
class ManagedEnvironment(Protocol):
    """An environment with processes or connections."""

    async def start(self) -> None:
        """Start them before the first ``reset``. Raises ``RolloutError``."""
        ...

    async def shutdown(self) -> None:
        """Stop them. Idempotent."""
        ...


class SessionError(RolloutError):
    """A child session has no answer. ``reason`` says why."""

    reason = "CHILD_SESSION"


class Chat(Protocol):
    """A model that is not the policy, such as ``rollout.endpoint.Endpoint``."""

    async def chat(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> Reply:
        """The model's answer to a conversation. Raises ``SessionError``."""
        ...


class ChildSession:
    """A conversation with a model inside an episode. Example, in ``step`` of a ``SingleEpisode``::

        critic = self.sessions.open()
        reply = await critic.chat("Is this right? " + turn.text)

    reward: of the session, if it is not that of the episode; set it before the episode ends.
    """

    def __init__(self, sessions: Sessions, number: int, model: str, tools: Sequence[Mapping[str, Any]]) -> None:
        self._sessions, self._tools = sessions, tuple(tools)
        self.number, self.model = number, model
        self.reward: float | None = None

    async def chat(self, said: str | Sequence[Message]) -> Reply:
        """The next turn of the session after a text or messages, those since its last turn. Raises
        ``SessionError``."""
        messages = () if isinstance(said, str) else tuple(said)
        observation = Observation(text=said if isinstance(said, str) else "", messages=messages, tools=self._tools)
        self._tools = ()
        return await self._sessions.ask(ChildTurn(self.number, observation, self.model))


class OtherSession:
    """A conversation with a model that is not the policy. It is not trained on, and not in the
    run's trajectories."""

    def __init__(self, model: Chat, tools: Sequence[Mapping[str, Any]]) -> None:
        self._model, self._tools = model, tuple(tools)
        self.messages: list[Message] = []
        """The conversation so far."""

    async def chat(self, said: str | Sequence[Message]) -> Reply:
        """The next turn of the session after a text or messages, those since its last turn. Raises
        ``SessionError``, after which the same can be said again."""
        asked = [*self.messages, *([{"role": "user", "content": said}] if isinstance(said, str) else said)]
        reply = await self._model.chat(asked, self._tools)
        answer: dict[str, Any] = {"role": "assistant", "content": reply.content}
        if reply.tool_calls:
            answer["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.raw}}
                for call in reply.tool_calls
            ]
        self.messages = [*asked, answer]
        return reply


class Sessions:
    """The child sessions of an episode. Sessions that are asked at the same time, for example with
    ``asyncio.gather``, are sampled together. Belongs to one event loop."""

    def __init__(self) -> None:
        self._opened: list[ChildSession] = []
        self._asked: list[ChildTurn] = []
        self._waiting: dict[int, asyncio.Future[Reply]] = {}
        self._some = asyncio.Event()

    @overload
    def open(self, model: str = "policy", *, tools: Sequence[Mapping[str, Any]] = ()) -> ChildSession: ...
    @overload
    def open(self, model: Chat, *, tools: Sequence[Mapping[str, Any]] = ()) -> OtherSession: ...
    def open(self, model: str | Chat = "policy", *, tools: Sequence[Mapping[str, Any]] = ()) -> ChildSession | OtherSession:
        """A session. model: who answers, the ``policy`` or another model; ``chat`` raises
        CHILD_MODEL for other names. tools: the functions that it may call, as in OpenAI's API.

        The sessions of the policy are numbered in the order of ``open``."""
        if not isinstance(model, str):
            return OtherSession(model, tools)
        session = ChildSession(self, len(self._opened), model, tools)
        self._opened.append(session)
        return session

    async def ask(self, turn: ChildTurn) -> Reply:
        """The reply of a session. Raises ``SessionError``."""
        if turn.child in self._waiting:
            raise SessionError(f"child session {turn.child} is still answering", fix="await each `chat` before the next one")
        answered = self._waiting[turn.child] = asyncio.get_running_loop().create_future()
        self._asked.append(turn)
        self._some.set()
        try:
            reply = await answered
        finally:
            self._waiting.pop(turn.child, None)
        if reply.error:
            error = SessionError(reply.message)
            error.__dict__["reason"] = reply.error
            raise error
        return reply

    async def asked(self) -> None:
        """Wait until a session is asked."""
        await self._some.wait()
        await asyncio.sleep(0)  # for the others of a `gather`

    def taken(self) -> ChildTurns:
        """What the sessions have been asked since the last call."""
        turns, self._asked = tuple(self._asked), []
        self._some.clear()
        return ChildTurns(turns)

    def answer(self, replies: Sequence[Reply]) -> None:
        """Give the replies to those that wait for them."""
        for reply in replies:
            if (waiting := self._waiting.get(reply.child)) is not None and not waiting.done():
                waiting.set_result(reply)

    def rewards(self) -> dict[int, float]:
        """The rewards that were set, by number."""
        return {session.number: session.reward for session in self._opened if session.reward is not None}


class SingleEpisode:
    """Base class of an environment that is written for one episode: each sample has its own
    instance. The arguments of the constructor are those of ``[environment.args]``. Methods may be
    ``async`` or not, and may return a text or a list of messages for an observation.

    ``self.sessions`` opens child sessions, which ``step`` may ask if it is ``async``.

    For snapshots of open episodes, define ``state_dict(self)`` and ``load_state_dict(self, state)``
    over plain data.
    """

    sessions: Sessions

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        made = super().__new__(cls)
        made.sessions = Sessions()
        return made

    def reset(self, task: Task) -> Any:
        """The first observation. It must depend on ``task.row_json`` and ``task.seed`` only,
        because the samples of a task share it."""
        raise NotImplementedError("define `async def reset(self, task)`")

    def step(self, turn: Turn) -> Any:
        """The next observation, or the result."""
        raise NotImplementedError("define `async def step(self, turn)`")

    def close(self) -> Any:
        """Release resources. Called once for each instance."""


def failed(reason: str, message: str = "") -> Result:
    """An infrastructure failure. Never a reward of 0."""
    return Result(outcome="infra_failed", reason=reason, message=message)


def reason_of(error: BaseException, otherwise: str) -> str:
    """The machine-readable reason of an exception."""
    reason: Any = getattr(error, "reason", None)
    return reason if isinstance(reason, str) and reason else otherwise


def calls_of(message: Mapping[str, Any]) -> tuple[ToolCall, ...]:
    """The tool calls of a message, with parsed arguments."""
    found: list[ToolCall] = []
    for call in message.get("tool_calls") or ():
        function = call["function"]
        raw, error = str(function["arguments"]), ""
        arguments: dict[str, Any] = {}
        try:
            read: Any = json.loads(raw or "{}")
            if isinstance(read, dict):
                arguments = cast(dict[str, Any], read)
            else:
                error = f"the arguments are {type(read).__name__}, not an object"
        except ValueError as problem:
            error = f"the arguments are not JSON: {problem}"
        found.append(ToolCall(str(call["id"]), str(function["name"]), arguments, error, raw))
    return tuple(found)
