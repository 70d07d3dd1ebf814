"""From observations to tokens, and from sampled tokens to the parts of a turn. A turn's tokens are
never made from text again: the next prompt is the earlier ids and those of the new messages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout.environment import Message, Observation
from rollout_workers.chat.families import ParserChoice
from rollout_workers.chat.requests import ChatRequest, call_id
from rollout_workers.chat.writer import MessageWriter
from rollout_workers.data.prompts import PromptInvalid, Text
from rollout_workers.engines.base import SampleOutput
from rollout_workers.sessions.messages import text_of
from rollout_workers.sessions.template import DEFAULT, ChatTemplate

Ids = NDArray[np.int32]
Tools = tuple[Mapping[str, Any], ...]


class Dialogue:
    """Renders observations and parses turns, for one tokenizer."""

    def __init__(self, text: Text, *, chat: bool, stop: tuple[str, ...] = ()) -> None:
        """chat: whether a text alone is a message of the user. stop: the stop strings of turns."""
        self._text, self._chat, self._stop = text, chat, stop
        self._template = ChatTemplate(text)
        self._choice = ParserChoice(text.template)

    def begin(self, first: Observation) -> Observation:
        """The first observation with its tokens and text. Raises ``PromptInvalid``."""
        if len(first.token_ids):
            return first
        messages = self._messages(first)
        if not messages:
            return replace(first, token_ids=self._text.encode([first.text])[0])
        ids = np.concatenate([piece.token_ids for piece in self._template.begin(messages, first.tools)])
        return replace(first, token_ids=ids, messages=messages, text=self._text.decode([ids])[0])

    def following(self, turn: Message, sampled: Ids, observation: Observation, tools: Tools) -> Observation:
        """A further observation with the tokens between a turn and the next one. turn: what the
        policy said. Raises ``PromptInvalid``."""
        if len(observation.token_ids):
            return observation
        messages = self._messages(observation)
        if not messages:
            [ids] = self._text.following([observation.text], [sampled])
            return replace(observation, token_ids=ids)
        piece = self._template.bridge(turn, sampled, messages, tools)
        text = observation.text or "\n".join(text_of(message) for message in messages)
        return replace(observation, token_ids=piece.token_ids, messages=messages, text=text)

    def message(self, prompt: Ids, output: SampleOutput, tools: Tools, name: str) -> Message:
        """The message of a turn. prompt: the tokens before it. name: of the turn, for the ids of
        its calls."""
        schemas = {str(tool["function"]["name"]): tool["function"].get("parameters") or {} for tool in tools}
        chat = ChatRequest([], tools, schemas, DEFAULT, required=False, parallel=True)
        length = self._choice.family.id_length
        writer = MessageWriter(self._text, self._choice, chat, prompt, self._stop, partial(call_id, name, 0, 0, length=length))
        writer.finish(output.token_ids, stopped=output.finish_reason == "stop")
        return writer.message()

    def _messages(self, observation: Observation) -> tuple[Message, ...]:
        if observation.messages:
            if not self._text.template:
                raise PromptInvalid(
                    "the environment observes messages, but the model's tokenizer has no chat template",
                    fix="use a model with a chat template, or observe a text",
                )
            return observation.messages
        return ({"role": "user", "content": observation.text},) if self._chat else ()
