"""Turns the outputs of an engine into the pieces of one completion."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rollout.inference.v1 import inference_pb2 as pb
from rollout.trajectory.v1.trajectory_pb2 import VersionSpan
from rollout_workers.data.prompts import Text
from rollout_workers.engines.base import PromptLogprobs, SampleDelta, SampleOutput, TopLogprobs

_FINISH = {"stop": "stop", "length": "length", "aborted": "abort"}


@dataclass(slots=True)
class Completion:
    """One completion of a request. prompt, sample: its place in the request. ids: of the prompt.
    token_bytes: whether the pieces have the bytes of their tokens. scored: of the prompt, if
    requested."""

    text: Text
    prompt: int
    sample: int
    ids: NDArray[np.int32]
    token_bytes: bool = False
    scored: PromptLogprobs | None = None

    def piece(self, delta: SampleDelta) -> pb.GenerateResponse:
        """A piece before the last one."""
        response = pb.GenerateResponse(prompt=self.prompt, sample=self.sample, text=delta.text, weights_version=delta.version)
        self._tokens(response, delta)
        return response

    def last(self, output: SampleOutput, *, whole: bool) -> pb.GenerateResponse:
        """The last piece. whole: it is the only one. Raises the sample's error."""
        if output.error is not None:
            raise output.error
        response = self._ending(_FINISH[output.finish_reason])
        response.version_spans.extend(VersionSpan(version=s.version, start=s.start, end=s.end) for s in output.version_spans)
        response.stop_string, response.cached_tokens = output.stop_string or "", output.cached_tokens
        if whole:
            response.text = output.text or ""
            self._tokens(response, output)
        return response

    def unsampled(self) -> pb.GenerateResponse:
        """The only piece of a completion whose tokens are used up before the first one."""
        return self._ending("length")

    def _ending(self, finish_reason: str) -> pb.GenerateResponse:
        response = pb.GenerateResponse(
            prompt=self.prompt,
            sample=self.sample,
            finish_reason=finish_reason,
            prompt_tokens=len(self.ids),
            prompt_token_ids=self.ids.tolist(),
        )
        if self.scored is not None:
            response.prompt_logprobs.extend(self.scored.logprobs.tolist())
            response.prompt_texts.extend(self.text.pieces(self.ids))
            if self.scored.top is not None:
                response.prompt_top_logprobs.extend(self._top(self.scored.top))
        return response

    def _tokens(self, response: pb.GenerateResponse, of: SampleDelta | SampleOutput) -> None:
        response.token_ids.extend(of.token_ids.tolist())
        response.logprobs.extend(of.logprobs.tolist())
        response.raw_logprobs.extend(() if of.raw_logprobs is None else of.raw_logprobs.tolist())
        if self.token_bytes:
            response.token_bytes.extend(self.text.token_bytes(of.token_ids))
        if of.top_logprobs is not None:
            response.top_logprobs.extend(self._top(of.top_logprobs))

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
