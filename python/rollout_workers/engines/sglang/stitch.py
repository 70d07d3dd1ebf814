"""Joins the segments of a sample between aborts. Imports neither torch nor SGLang."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def stitch(segments: Sequence[Mapping[str, Any]], most: int) -> dict[str, Any]:
    """One result of SGLang from those of consecutive requests, each of which continued the one
    before.

    Ids, logprobs, and version spans are those of all segments. most: ``max_new_tokens`` of the
    whole; a result that reached it has the finish reason ``length``, even if its last segment was
    aborted.
    """
    last = segments[-1]
    meta = dict(last["meta_info"])
    ids: list[int] = []
    joined: dict[str, list[Any]] = {}
    spans: list[dict[str, Any]] = []
    for segment in segments:
        shift = len(ids)
        ids += segment["output_ids"]
        for key in ("output_token_logprobs", "output_top_logprobs"):
            if key in segment["meta_info"]:
                joined.setdefault(key, []).extend(segment["meta_info"][key])
        for span in segment["meta_info"].get("weight_versions", ()):
            moved = {"version": span["version"], "start": span["start"] + shift, "end": span["end"] + shift}
            if moved["end"] == moved["start"]:
                continue
            if spans and spans[-1]["version"] == moved["version"]:
                spans[-1]["end"] = moved["end"]
            else:
                spans.append(moved)
    meta |= joined
    meta["completion_tokens"] = len(ids)
    if spans:
        meta["weight_versions"] = spans
    if len(ids) >= most and meta["finish_reason"]["type"] == "abort":
        meta["finish_reason"] = {"type": "length", "length": most}
    result = {**last, "output_ids": ids, "meta_info": meta}
    if any("text" in segment for segment in segments):
        result["text"] = "".join(segment.get("text") or "" for segment in segments)
    return result
