"""The errors of engines."""

from __future__ import annotations


class EngineError(Exception):
    """An error of an engine. ``reason`` is a stable identifier for programs; the message says how
    to fix it."""

    reason = "ENGINE_ERROR"


class ContextOverflow(EngineError):
    """The prompt leaves no room for a token in the context. Returned as the ``error`` of each
    sample of the request."""

    reason = "CONTEXT_OVERFLOW"

    def __init__(self, request_id: str, prompt_tokens: int, max_len: int) -> None:
        super().__init__(
            f"request {request_id}: a prompt of {prompt_tokens} tokens leaves no room in a context of {max_len}; "
            "shorten the prompt or start the engine with a larger max_len"
        )
        self.prompt_tokens, self.max_len = prompt_tokens, max_len


class InvalidPrompt(EngineError):
    """The prompt is empty or has ids outside of the vocabulary. Returned as the ``error`` of each
    sample of the request."""

    reason = "INVALID_PROMPT"


class InvalidParameters(EngineError):
    """The sampling parameters do not fit the model or the request. Returned as the ``error`` of
    each sample of the request."""

    reason = "INVALID_PARAMETERS"


class InvalidConstraint(EngineError):
    """The constraint of a request can't be compiled, or the tokens to continue do not match it.
    Returned as the ``error`` of each sample of the request."""

    reason = "INVALID_CONSTRAINT"


class ConstraintsUnavailable(EngineError):
    """The engine can't constrain samples: the library is missing, or the tokenizer does not fit.
    Returned as the ``error`` of each sample of the request."""

    reason = "CONSTRAINTS_UNAVAILABLE"


class DuplicateRequest(EngineError):
    """The id of a request in ``generate`` belongs to an unfinished request. No request of the call
    was started."""

    reason = "DUPLICATE_REQUEST"


class TokenizerMissing(EngineError):
    """A request has stop strings or streams, but the engine has no tokenizer. No request of the
    call was started."""

    reason = "TOKENIZER_MISSING"


class NonFiniteLogits(EngineError):
    """The model's logits are NaN or infinite. Returned as the ``error`` of the sample; other
    samples continue."""

    reason = "NON_FINITE_LOGITS"


class EngineFailed(EngineError):
    """A forward pass raised an exception, which is chained. Returned as the ``error`` of every
    unfinished sample."""

    reason = "ENGINE_FAILED"


class EngineClosed(EngineError):
    """The engine was shut down."""

    reason = "ENGINE_CLOSED"


class NothingStaged(EngineError):
    """``swap_weights`` was called for a version that is not current while no weights were
    staged."""

    reason = "NOTHING_STAGED"


class ModelUnsupported(EngineError):
    """The engine can't decode the model, or not in the requested mode."""

    reason = "MODEL_UNSUPPORTED"
    permanent = True
    """Restarting the worker does not help."""


class WeightsMismatch(EngineError):
    """The weights differ from the expected names, shapes, or digest. Nothing was loaded.

    tensor: the first one that differs, or "" if only the roots were compared. expected, got:
    digests, shapes, or dtypes as text.
    """

    reason = "WEIGHTS_MISMATCH"

    def __init__(self, tensor: str, expected: str, got: str) -> None:
        where = f"tensor {tensor}" if tensor else "weights"
        super().__init__(f"{where}: expected {expected}, got {got}; nothing was loaded; load this version again")
        self.tensor, self.expected, self.got = tensor, expected, got
