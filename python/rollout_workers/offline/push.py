"""The process behind ``rollout export push``: uploads a folder to a model repository of the hub.

The spec is one JSON object in a file:

    {"folder": "/tmp/model", "repository": "org/name", "revision": "", "private": true, "message": "step 40"}

Standard output gets one JSON object: ``end`` with the commit, or ``error``. The token and the
address of the hub come from the environment of huggingface_hub (``HF_TOKEN``, ``HF_HOME``,
``HF_ENDPOINT``).
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, cast

from rollout.errors import RolloutError

log = logging.getLogger(__name__)

EXIT_USAGE = 64
EXIT_DATA = 65
EXIT_NO_INPUT = 66
EXIT_UNAVAILABLE = 69
EXIT_SOFTWARE = 70


class PushError(RolloutError):
    """The hub refused the upload. ``code`` is the exit code (sysexits)."""

    reason: ClassVar[str] = "HUB_REFUSED"
    code: ClassVar[int] = EXIT_DATA


class LibraryMissing(PushError):
    """huggingface_hub is not installed."""

    reason: ClassVar[str] = "LIBRARY_MISSING"
    code: ClassVar[int] = EXIT_NO_INPUT


class NoToken(PushError):
    """Neither the environment nor a file has a token."""

    reason: ClassVar[str] = "HUB_NO_TOKEN"
    code: ClassVar[int] = EXIT_NO_INPUT


class Denied(PushError):
    """The token is invalid or may not write to the repository."""

    reason: ClassVar[str] = "HUB_DENIED"


class Unreachable(PushError):
    """The hub does not answer."""

    reason: ClassVar[str] = "HUB_UNREACHABLE"
    code: ClassVar[int] = EXIT_UNAVAILABLE


class BadName(PushError):
    """The name of the repository is invalid."""

    reason: ClassVar[str] = "HUB_BAD_NAME"
    code: ClassVar[int] = EXIT_USAGE


class AlreadyPublic(PushError):
    """The repository exists and is public, but the upload was to be private."""

    reason: ClassVar[str] = "HUB_REPOSITORY_PUBLIC"


@dataclass(frozen=True, slots=True)
class PushSpec:
    """folder: absolute. revision: a branch, created if it does not exist; "" is main."""

    folder: str
    repository: str
    revision: str
    private: bool
    message: str


def push(path: str) -> int:
    """Upload as the spec at ``path`` says. Returns the exit code."""
    try:
        commit = upload(PushSpec(**json.loads(Path(path).read_text())))
    except PushError as error:
        _report("error", code=error.code, reason=error.reason, message=error.message, fix=error.fix)
        return error.code
    except Exception as error:
        log.exception("the upload failed")
        _report("error", code=EXIT_SOFTWARE, reason="INTERNAL", message=repr(error), fix="see the log for the stack trace")
        return EXIT_SOFTWARE
    _report("end", **commit)
    return 0


def upload(spec: PushSpec) -> dict[str, Any]:
    """Create the repository if it does not exist, and upload the folder as one commit. Returns the
    ``commit`` and its ``url``. Raises :class:`PushError`."""
    os.environ["HF_HUB_OFFLINE"] = "0"  # workers of runs are offline
    try:
        import huggingface_hub as hub
    except ImportError as error:
        raise LibraryMissing("the library huggingface_hub is not installed", fix="pip install huggingface_hub") from error
    if not (token := hub.get_token()):
        raise NoToken("a token for the hub is missing", fix="run `hf auth login`, or set HF_TOKEN")
    api = hub.HfApi(token=token)
    hub.utils.disable_progress_bars()
    with _translated(spec.repository):
        api.create_repo(spec.repository, private=spec.private, exist_ok=True)
        if spec.private and not api.model_info(spec.repository).private:
            raise AlreadyPublic(
                f"the repository {spec.repository} exists and is public",
                fix="push with --public, or make the repository private on its page of the hub",
            )
        if spec.revision:
            api.create_branch(spec.repository, branch=spec.revision, exist_ok=True)
        done = api.upload_folder(
            repo_id=spec.repository,
            folder_path=spec.folder,
            revision=spec.revision or None,
            commit_message=spec.message,
        )
    return {"commit": done.oid, "url": done.commit_url}


@contextmanager
def _translated(repository: str) -> Iterator[None]:
    """Turns errors of the library into errors with a reason and a fix."""
    from huggingface_hub import errors

    try:
        yield
    except PushError:
        raise
    except errors.HFValidationError as error:
        raise BadName(f"{repository!r} is not the name of a repository: {_line(error)}", fix="use the form owner/name") from error
    except Exception as error:
        status = cast(int, getattr(getattr(error, "response", None), "status_code", 0))
        if status in (401, 403):
            raise Denied(
                f"the hub denied writing to {repository}: {_line(error)}",
                fix="log in with `hf auth login`, with a token that may write to it",
            ) from error
        if status >= 500 or _no_answer(error):
            where = os.environ.get("HF_ENDPOINT", "huggingface.co")
            raise Unreachable(
                f"cannot push to {repository}: the hub {where} does not answer ({_line(error)})",
                fix="check the network and HF_ENDPOINT, then repeat the command: what was uploaded is not sent again",
            ) from error
        if status:
            raise PushError(
                f"the hub refused the upload to {repository}: {_line(error)}", fix="check the name and the revision"
            ) from error
        raise


def _no_answer(error: BaseException | None) -> bool:
    """Whether the cause of an error is the network."""
    names: set[str] = set()
    while error is not None:
        names |= {cls.__name__ for cls in type(error).__mro__}
        error = error.__cause__ or error.__context__
    return bool(names & {"TransportError", "ConnectionError", "TimeoutError", "OfflineModeIsEnabled"})


def _line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


def _report(event: str, **facts: Any) -> None:
    print(json.dumps({"event": event, **facts}, ensure_ascii=False), flush=True)
