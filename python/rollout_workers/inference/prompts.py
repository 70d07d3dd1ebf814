"""The prompts of a request as token ids."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from rollout.inference.v1 import inference_pb2 as pb
from rollout_workers.chat.requests import ChatRequest, chat_of
from rollout_workers.data.prompts import Text
from rollout_workers.sessions import session as sessions
from rollout_workers.sessions.cache import OpenSession
from rollout_workers.sessions.session import Session
from rollout_workers.sessions.template import ChatTemplate
from rollout_workers.worker.status import EdgeError

_LONG = 16 << 10  # longer prompts are tokenized in a thread; this many bytes take about 0.02 s
_MOST_ID = np.iinfo(np.int32).max


class ContextOverflow(EdgeError):
    """The prompt and the requested tokens exceed the context."""

    reason: ClassVar[str] = "CONTEXT_OVERFLOW"


class InvalidPrompt(EdgeError):
    """The prompt has no tokens, or token ids outside of the vocabulary."""

    reason: ClassVar[str] = "INVALID_PROMPT"


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """One prompt of a request. ids int32[T]. chat: None for a text or tokens. turn: in a
    session."""

    ids: NDArray[np.int32]
    chat: ChatRequest | None = None
    turn: sessions.Prompt | None = None


class Prompts:
    """Makes the prompts of requests."""

    def __init__(self, text: Text, max_model_len: int) -> None:
        self.template = ChatTemplate(text)
        self._text, self._limit = text, max_model_len

    async def read(self, prompts: Sequence[pb.Prompt], *, bounded: bool = False) -> list[Asked]:
        """The prompts, each rendered as a whole. Long ones are tokenized in a thread.

        Raises ``PromptInvalid`` for a chat that the template rejects, ``InvalidRequest`` for
        invalid tools, ``InvalidPrompt`` for an id outside of the vocabulary, and, if ``bounded``,
        ``ContextOverflow`` for a text that can't fit, before it is tokenized.
        """
        if bounded:
            self._check_size(prompts)
        if sum(prompt.ByteSize() for prompt in prompts) > _LONG:
            return await asyncio.to_thread(self._read, prompts)
        return self._read(prompts)

    async def read_turns(self, prompts: Sequence[pb.Prompt], session: OpenSession) -> list[Asked]:
        """The prompts as turns of a session. Raises like ``read``, bounded."""
        self._check_size(prompts)
        out: list[Asked] = []
        for at, prompt in enumerate(prompts):
            chat = chat_of(prompt.chat, f"prompts[{at}].chat") if prompt.HasField("chat") else None

            def make(tree: Session, at: int = at, prompt: pb.Prompt = prompt, chat: ChatRequest | None = chat) -> sessions.Prompt:
                if chat is not None:
                    return tree.prompt(chat.messages, tools=chat.tools, options=chat.options)
                [plain] = self._plain([(at, prompt)]).values()
                return tree.prompt_tokens(plain)

            turn = await session.prompt(make, prompt.ByteSize())
            out.append(Asked(turn.token_ids, chat, turn))
        return out

    def _read(self, prompts: Sequence[pb.Prompt]) -> list[Asked]:
        plain = self._plain([(at, prompt) for at, prompt in enumerate(prompts) if not prompt.HasField("chat")])
        out: list[Asked] = []
        for at, prompt in enumerate(prompts):
            if prompt.HasField("chat"):
                chat = chat_of(prompt.chat, f"prompts[{at}].chat")
                out.append(Asked(self.template.whole(chat.messages, chat.tools, chat.options), chat))
            else:
                out.append(Asked(plain[at]))
        return out

    def _plain(self, prompts: Sequence[tuple[int, pb.Prompt]]) -> dict[int, NDArray[np.int32]]:
        """The ids of each text and list of tokens, by its place."""
        out: dict[int, NDArray[np.int32]] = {}
        for special in (True, False):
            texts = {
                at: prompt.text for at, prompt in prompts if prompt.HasField("text") and prompt.no_special_tokens is not special
            }
            if texts:
                out.update(zip(texts, self._text.encode([*texts.values()], special=special), strict=True))
        for at, prompt in prompts:
            if prompt.HasField("tokens"):
                ids = np.array(prompt.tokens.ids, np.uint32)
                if len(ids) and (wrong := ids.max()) > _MOST_ID:
                    raise outside(int(wrong), at, f"prompts[{at}].tokens.ids")
                out[at] = ids.astype(np.int32)
        return out

    def _check_size(self, prompts: Sequence[pb.Prompt]) -> None:
        for at, prompt in enumerate(prompts):
            messages = prompt.chat.messages
            size = len(prompt.text) + sum(len(message.content) + len(message.reasoning) for message in messages)
            if size > _LONG and size > self._limit * self._text.longest:
                problem = f"the text of prompt {at} has {size} characters, too many for a context of {self._limit} tokens"
                raise ContextOverflow(problem, fix="shorten the prompt", violations=[(f"prompts[{at}]", problem)])


def outside(token: int, prompt: int, path: str) -> InvalidPrompt:
    """The error of a token id that the vocabulary does not have."""
    return InvalidPrompt(
        f"token id {token} of prompt {prompt} is outside the vocabulary",
        fix="encode the prompt with the tokenizer of this model",
        violations=[(path, "must be in the vocabulary")],
    )
