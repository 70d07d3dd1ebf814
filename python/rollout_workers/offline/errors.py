"""The errors of a batch. Does not import torch."""

from __future__ import annotations

from typing import ClassVar

from rollout.errors import RolloutError

EXIT_DATA = 65
EXIT_NO_INPUT = 66
EXIT_SOFTWARE = 70
EXIT_CANNOT_MAKE = 73
EXIT_INTERRUPTED = 130


class BatchError(RolloutError):
    """Base; ``code`` is the exit code (sysexits)."""

    code: ClassVar[int] = EXIT_DATA


class SpecInvalid(BatchError):
    """The spec file is missing or can't be read."""

    reason: ClassVar[str] = "BATCH_SPEC_INVALID"
    code: ClassVar[int] = EXIT_NO_INPUT


class MissingFile(BatchError):
    """The dataset or the model does not exist."""

    reason: ClassVar[str] = "MISSING_FILE"
    code: ClassVar[int] = EXIT_NO_INPUT


class BadDataset(BatchError):
    """The dataset has no rows, or a line that is not a row."""

    reason: ClassVar[str] = "BAD_ROW"


class BadPrompt(BatchError):
    """Some rows don't give a prompt, or give one that is too long."""

    reason: ClassVar[str] = "PROMPT_INVALID"


class BadModel(BatchError):
    """The model's folder can't be loaded."""

    reason: ClassVar[str] = "BAD_MODEL"


class WeightsDiffer(BatchError):
    """The loaded weights are not the weights that the snapshot names."""

    reason: ClassVar[str] = "WEIGHTS_MISMATCH"


class InputsChanged(BatchError):
    """The journal was started with other inputs."""

    reason: ClassVar[str] = "INPUTS_CHANGED"


class JournalDamaged(BatchError):
    """The journal can't be read."""

    reason: ClassVar[str] = "JOURNAL_DAMAGED"


class JournalBusy(BatchError):
    """Another process writes the same journal."""

    reason: ClassVar[str] = "JOURNAL_BUSY"
    code: ClassVar[int] = EXIT_CANNOT_MAKE


class CannotWrite(BatchError):
    """The output or the journal can't be written."""

    reason: ClassVar[str] = "CANNOT_WRITE"
    code: ClassVar[int] = EXIT_CANNOT_MAKE


class SamplesFailed(BatchError):
    """Some samples are INFRA_FAILED; the output was not written."""

    reason: ClassVar[str] = "SAMPLES_FAILED"
