"""Turns the outputs of an engine into the pieces of one completion."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rollout.inference.v1 import inference_pb2 as pb
from rollout.trajectory.v1.trajectory_pb2 import VersionSpan
from rollout_workers.chat.requests import assistant
from rollout_workers.chat.writer import MessageWriter
from rollout_workers.data.prompts import Text
from rollout_workers.engines.base import PromptLogprobs, SampleDelta, SampleOutput, TopLogprobs
from rollout_workers.inference.prompts import Asked
from rollout_workers.sessions.messages import Message
from rollout_workers.sessions.segment import Sampled

_FINISH = {"stop": "stop", "length": "length", "aborted": "abort"}


@dataclass(slots=True)
class Completion:
    """One completion of a request. prompt, sample: its place in the request. token_bytes: whether
    the pieces have the bytes of their tokens. before int32[C]: tokens that an earlier request
    sampled. writer: of the message, if it is parsed. scored: of the prompt, if requested. output:
    when it has ended."""

    text: Text
    prompt: int
    sample: int
    asked: Asked
    token_bytes: bool = False
    before: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    writer: MessageWriter | None = None
    scored: PromptLogprobs | None = None
    output: SampleOutput | None = None
    _sent: int = 0  # tokens and characters in earlier pieces
    _said: int = 0

    def piece(self, delta: SampleDelta) -> pb.GenerateResponse:
        """A piece before the last one."""
        response = pb.GenerateResponse(prompt=self.prompt, sample=self.sample, text=delta.text, weights_version=delta.version)
        self._tokens(response, delta, 0)
        self._sent += len(delta.token_ids)
        self._said += len(delta.text)
        if self.writer is not None:
            response.delta.CopyFrom(self.writer.add(delta.token_ids))
        return response

    def last(self, output: SampleOutput) -> pb.GenerateResponse:
        """The last piece, with what earlier pieces do not have. Raises the sample's error."""
        if output.error is not None:
            raise output.error
        self.output = output
        response = self._ending(_FINISH[output.finish_reason], output.token_ids[self._sent :])
        response.version_spans.extend(VersionSpan(version=s.version, start=s.start, end=s.end) for s in output.version_spans)
        response.stop_string, response.cached_tokens = output.stop_string or "", output.cached_tokens
        response.text = (output.text or "")[self._said :]
        self._tokens(response, output, self._sent)
        return response

    def unsampled(self) -> pb.GenerateResponse:
        """The only piece of a completion whose tokens are used up before the first one."""
        return self._ending("length", np.zeros(0, np.int32))

    def sampled(self) -> Sampled:
        """The turn of the session, when the completion has ended, with the message that the client
        was sent."""
        if self.output is None:
            return Sampled(np.zeros(0, np.int32), np.zeros(0, np.float32), message=self._message(""))
        return Sampled.of(self.output, self._message(self.output.text or ""))

    def _message(self, text: str) -> Message | None:
        """The message of a chat. text: of what this request sampled."""
        if self.asked.chat is None:
            return None
        if self.writer is not None:
            message = self.writer.message()
        else:
            message = assistant(self.text.decode([self.before])[0] + text, "", [])
        if not self.asked.chat.options.continues:
            return message
        begun = self.asked.chat.messages[-1]
        reasoning = str(begun.get("reasoning_content", "")) + str(message.get("reasoning_content", ""))
        return {**assistant(str(begun["content"]) + str(message["content"]), reasoning, []), **_calls(message)}

    def _ending(self, finish_reason: str, ids: NDArray[np.int32]) -> pb.GenerateResponse:
        """ids: the tokens that no piece had."""
        response = pb.GenerateResponse(
            prompt=self.prompt,
            sample=self.sample,
            finish_reason=finish_reason,
            prompt_tokens=len(self.asked.ids),
            prompt_token_ids=self.asked.ids.tolist(),
        )
        if self.writer is not None:
            response.delta.CopyFrom(self.writer.finish(ids, stopped=finish_reason == "stop"))
        if self.scored is not None:
            response.prompt_logprobs.extend(self.scored.logprobs.tolist())
            response.prompt_texts.extend(self.text.pieces(self.asked.ids))
            if self.scored.top is not None:
                response.prompt_top_logprobs.extend(self._top(self.scored.top))
        return response

    def _tokens(self, response: pb.GenerateResponse, of: SampleDelta | SampleOutput, start: int) -> None:
        """Add the tokens from ``start``."""
        response.token_ids.extend(of.token_ids[start:].tolist())
        response.logprobs.extend(of.logprobs[start:].tolist())
        response.raw_logprobs.extend(() if of.raw_logprobs is None else of.raw_logprobs[start:].tolist())
        if self.token_bytes:
            response.token_bytes.extend(self.text.token_bytes(of.token_ids[start:]))
        if (top := of.top_logprobs) is not None:
            response.top_logprobs.extend(self._top(TopLogprobs(top.token_ids[start:], top.logprobs[start:])))

    def _top(self, top: TopLogprobs) -> Sequence[pb.TopLogprobs]:
        """One message per position. The first token of a prompt has no alternatives, whose ids are
        negative."""
        out: list[pb.TopLogprobs] = []
        for ids, logprobs in zip(top.token_ids, top.logprobs, strict=True):
            kept = ids >= 0
            message = pb.TopLogprobs(token_ids=ids[kept].tolist(), logprobs=logprobs[kept].tolist())
            if self.token_bytes:
                message.token_bytes.extend(self.text.token_bytes(ids[kept]))
            out.append(message)
        return out


def _calls(message: Message) -> Message:
    return {name: value for name, value in message.items() if name == "tool_calls"}
