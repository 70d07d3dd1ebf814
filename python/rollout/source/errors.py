"""Why a data set or a model can't be read. Each error says how to fix that."""

from __future__ import annotations

from typing import ClassVar

from rollout.errors import RolloutError


class SourceError(RolloutError):
    """Base."""


class SourceRefused(Exception):
    """The error of one of several sources. source: its name."""

    def __init__(self, error: SourceError, source: str) -> None:
        super().__init__(str(error))
        self.error, self.source = error, source


class MissingFile(SourceError):
    """A file or folder is absent or unreadable."""

    reason: ClassVar[str] = "MISSING_FILE"


class BadSource(SourceError):
    """A file, folder, or data set can't be read as rows."""

    reason: ClassVar[str] = "BAD_ROW"


class BadBaseline(SourceError):
    """The completions to compare with are of other rows."""

    reason: ClassVar[str] = "BASELINE_INVALID"


class LibraryMissing(SourceError):
    """A library for a format or for the hub is not installed."""

    reason: ClassVar[str] = "LIBRARY_MISSING"


class HubNotFound(SourceError):
    """The hub has no such repository, revision, subset, or split."""

    reason: ClassVar[str] = "HUB_NOT_FOUND"


class HubDenied(SourceError):
    """The repository is gated or private, and the token is absent or lacks access."""

    reason: ClassVar[str] = "HUB_DENIED"


class HubUnreachable(SourceError):
    """The hub does not answer, and the cache lacks the repository."""

    reason: ClassVar[str] = "HUB_UNREACHABLE"
