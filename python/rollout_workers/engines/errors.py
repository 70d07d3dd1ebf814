"""How an engine fails."""

from __future__ import annotations


class EngineError(Exception):
    """An engine's failure. ``reason`` is stable for machines, the message says what to do."""

    reason = "ENGINE_ERROR"


class ContextOverflow(EngineError):
    """The prompt leaves no room for a token. Arrives as the ``error`` of each sample of that
    request."""

    reason = "CONTEXT_OVERFLOW"

    def __init__(self, request_id: str, prompt_tokens: int, max_len: int) -> None:
        super().__init__(
            f"request {request_id}: a prompt of {prompt_tokens} tokens leaves no room in a context of {max_len}; "
            "shorten the prompt or start the engine with a larger max_len"
        )
        self.prompt_tokens, self.max_len = prompt_tokens, max_len


class InvalidPrompt(EngineError):
    """The prompt is empty or holds ids outside the vocabulary. Arrives as the ``error`` of each
    sample of that request."""

    reason = "INVALID_PROMPT"


class DuplicateRequest(EngineError):
    """``generate`` was given the id of a request in flight; nothing of that batch was started."""

    reason = "DUPLICATE_REQUEST"


class TokenizerMissing(EngineError):
    """Stop strings or streaming were asked of an engine without a tokenizer; nothing of that batch
    was started."""

    reason = "TOKENIZER_MISSING"


class NonFiniteLogits(EngineError):
    """The model's logits are NaN or infinite. Returned as the ``error`` of the sample; other
    samples continue."""

    reason = "NON_FINITE_LOGITS"


class EngineFailed(EngineError):
    """A forward pass raised. Arrives as the ``error`` of every sample in flight; the cause is
    chained."""

    reason = "ENGINE_FAILED"


class EngineClosed(EngineError):
    """The engine was shut down."""

    reason = "ENGINE_CLOSED"


class NothingStaged(EngineError):
    """``swap_weights`` was called for a version that is not current while no weights were
    staged."""

    reason = "NOTHING_STAGED"


class ModelUnsupported(EngineError):
    """The module can't be decoded by this engine, or not in the mode that was asked for."""

    reason = "MODEL_UNSUPPORTED"
    permanent = True
    """To start again would meet the same."""


class WeightsMismatch(EngineError):
    """The weights don't match the expected names, shapes, or digest; nothing was loaded.

    tensor: the first one that differs, or "" where only the roots do. expected, got: digests,
    shapes or dtypes as text.
    """

    reason = "WEIGHTS_MISMATCH"

    def __init__(self, tensor: str, expected: str, got: str) -> None:
        where = f"tensor {tensor}" if tensor else "weights"
        super().__init__(f"{where}: expected {expected}, got {got}; nothing was loaded, deliver this version again")
        self.tensor, self.expected, self.got = tensor, expected, got
