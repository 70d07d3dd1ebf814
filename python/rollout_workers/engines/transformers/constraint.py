"""Constraints on the text of samples, by llguidance: each step masks the tokens that can't lead to
a matching text."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rollout_workers.engines.base import Constraint
from rollout_workers.engines.errors import ConstraintsUnavailable, EngineError, InvalidConstraint

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_KEPT = 256
_WHITESPACE = r"( ?|\n {0,16})"
"""Of JSON: a space, or a new line with its indentation. Unlimited whitespace lets a model sample
nothing else."""


class Match:
    """What one sample may still sample."""

    def __init__(self, matcher: LLMatcher, vocabulary: int) -> None:
        self._matcher, self._vocabulary = matcher, vocabulary

    def copy(self) -> Match:
        """An independent match with the same tokens."""
        return Match(self._matcher.deep_copy(), self._vocabulary)

    def take(self, tokens: Sequence[int]) -> bool:
        """Add sampled tokens. Returns whether they match."""
        return self._matcher.consume_tokens(list(tokens))

    @property
    def complete(self) -> bool:
        """Whether only an end token may follow."""
        return self._matcher.is_stopped()

    def allowed(self) -> NDArray[np.bool_]:
        """bool[V]: the tokens that may follow."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        return np.unpackbits(bits, count=self._vocabulary, bitorder="little").astype(bool)


class Constraints:
    """Compiles constraints for a tokenizer, and keeps those used last. May be called in any
    thread."""

    def __init__(self, tokenizer: Any, vocabulary: int, end_ids: tuple[int, ...]) -> None:
        self._source, self._vocabulary, self._end_ids = tokenizer, vocabulary, end_ids
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[Constraint, Match | EngineError] = OrderedDict()
        self._lock = threading.Lock()

    def compiled(self, constraint: Constraint) -> Match | EngineError:
        """The match of no tokens, or why there is none. Takes up to seconds for a new
        constraint."""
        with self._lock:
            found = self._compiled.get(constraint)
            if found is None:
                found = self._compiled[constraint] = self._compile(constraint)
            self._compiled.move_to_end(constraint)
            if len(self._compiled) > _KEPT:
                self._compiled.popitem(last=False)
            return found

    def _compile(self, constraint: Constraint) -> Match | EngineError:
        try:
            import llguidance.hf
        except ImportError:
            return ConstraintsUnavailable(
                f"a constraint ({constraint.kind}) needs llguidance, which this worker lacks; install it: pip install llguidance"
            )
        try:
            if self._tokenizer is None:
                ends = [i for i in self._end_ids if i < self._vocabulary] or None
                self._tokenizer = llguidance.hf.from_tokenizer(self._source, n_vocab=self._vocabulary, eos_token=ends)
        except (ValueError, TypeError, AttributeError) as error:
            return ConstraintsUnavailable(
                f"constraints need a fast tokenizer of Hugging Face, and this model's can't be used: {error}; "
                "convert it to tokenizer.json, or send the request without a constraint"
            )
        try:
            matcher = llguidance.LLMatcher(self._tokenizer, grammar_of(constraint), log_level=0)
        except ValueError as error:
            return _invalid(constraint, str(error))
        return _invalid(constraint, matcher.get_error()) if matcher.is_error() else Match(matcher, self._vocabulary)


def grammar_of(constraint: Constraint) -> str:
    """The grammar of a constraint for llguidance. Raises ``ValueError``."""
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark

    value = constraint.value
    if constraint.kind in ("json_schema", "json_object"):
        schema = {"type": "object"} if constraint.kind == "json_object" else json.loads(value)
        if not isinstance(schema, dict | bool):
            raise ValueError("a schema must be an object")
        return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides={"whitespace_pattern": _WHITESPACE})
    if constraint.kind == "regex":
        return LLMatcher.grammar_from_regex(value)
    if constraint.kind == "grammar":
        try:
            return LLMatcher.grammar_from_lark(gbnf_to_lark(value) if "::=" in value else value)
        except GbnfToLarkError as error:
            raise ValueError(str(error)) from error
    choices = json.loads(value)
    if not isinstance(choices, list) or not choices or not all(isinstance(text, str) and text for text in choices):
        raise ValueError("choices must be a JSON list of one or more texts that are not empty")
    return LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in choices))


def _invalid(constraint: Constraint, why: str) -> InvalidConstraint:
    fix = {
        "json_schema": "send a JSON schema of draft 2020-12",
        "regex": "use the syntax of Rust's regex crate, without look-around and back references",
        "grammar": "send a grammar in GBNF (`root ::= ...`) or Lark (`start: ...`)",
    }.get(constraint.kind, "send a JSON list of texts")
    return InvalidConstraint(f"the constraint ({constraint.kind}) is invalid: {' '.join(why.split())[:500]}; {fix}")
