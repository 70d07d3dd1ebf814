"""Reads data sets and models of the Hugging Face Hub, each at one commit.

The libraries of Hugging Face read their settings from the environment: ``HF_TOKEN``, ``HF_HOME``,
``HF_ENDPOINT``, ``HF_HUB_OFFLINE``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rollout.source.errors import HubDenied, HubNotFound, HubUnreachable, SourceError
from rollout.source.formats import ending_of, library, to_json

Json = dict[str, Any]
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")
MODEL_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "vocab.txt", "merges.txt")
_COMMIT = re.compile(r"[0-9a-f]{40}")


def is_name(text: str, base_dir: str) -> bool:
    """Whether a text is a repository: it has the form ``org/name`` or ``org/name@revision``, and is
    neither a path into an existing folder nor one to a data file."""
    if not _NAME.fullmatch(text) or ending_of(text) or text.endswith((".gz", ".json", ".txt")):
        return False
    return not os.path.exists(os.path.join(base_dir, text.partition("/")[0]))


def parts_of(name: str) -> tuple[str, str | None]:
    """Repository and revision of a name; None without a revision."""
    repository, at, revision = name.partition("@")
    return repository, revision if at else None


def pin(name: str) -> str:
    """The commit of a data set. Raises :class:`SourceError`."""
    repository, revision = parts_of(name)
    if revision and _COMMIT.fullmatch(revision):
        return revision
    hub = library("huggingface_hub", f"the data set {repository} of the hub", "hub")
    with _translated(name, "data set"):
        return hub.HfApi().dataset_info(repository, revision=revision).sha


def rows(name: str, commit: str, subset: str, split: str) -> Iterator[bytes]:
    """The rows of a split of a data set. Raises :class:`SourceError`."""
    repository, _ = parts_of(name)
    datasets = library("datasets", f"the data set {repository} of the hub", "hub")
    datasets.disable_progress_bars()
    with _translated(name, "data set"):
        _check_subset(datasets, repository, commit, subset)
        names: list[str] = datasets.get_dataset_split_names(repository, subset or None, revision=commit)
        if split.partition("[")[0] not in names:
            choices = ", ".join(f'"{one}"' for one in names)
            raise HubNotFound(f"the data set {name} has no split `{split}`", fix=f"set the split in [data] to {choices}")
        data = datasets.load_dataset(repository, subset or None, split=split, revision=commit)
    number = 0
    for batch in data.with_format("arrow").iter(1000):
        for row in batch.to_pylist():
            number += 1
            yield to_json(row, f"row {number} of {repository}")


def model(name: str, patterns: Sequence[str] = MODEL_FILES) -> tuple[str, str]:
    """Folder and commit of a model, whose files that match ``patterns`` are downloaded to the cache
    of Hugging Face. Raises :class:`SourceError`."""
    repository, revision = parts_of(name)
    hub = library("huggingface_hub", f"the model {repository} of the hub", "hub")
    library("huggingface_hub.utils", "the hub", "hub").disable_progress_bars()
    with _translated(name, "model"):
        folder: str = hub.snapshot_download(repository, revision=revision, allow_patterns=list(patterns))
    return folder, os.path.basename(folder)


def download(request: Json) -> Json:
    """Download a model for the planner: ``{"name", "patterns"}`` to ``{"folder", "revision"}``."""
    folder, commit = model(request["name"], request["patterns"])
    return {"folder": folder, "revision": commit}


def _check_subset(datasets: Any, repository: str, commit: str, subset: str) -> None:
    names: list[str] = datasets.get_dataset_config_names(repository, revision=commit)
    choices = ", ".join(f'"{one}"' for one in names[:10])
    if subset and subset not in names:
        raise HubNotFound(f"the data set {repository} has no subset `{subset}`", fix=f"set `subset` to {choices}")
    if not subset and len(names) > 1 and "default" not in names:
        raise HubNotFound(f"the data set {repository} has several subsets", fix=f"set `subset` to {choices}")


@contextmanager
def _translated(name: str, kind: str) -> Generator[None]:
    """Turns errors of the libraries into errors with a reason and a fix."""
    from huggingface_hub import errors

    repository, revision = parts_of(name)
    try:
        yield
    except SourceError:
        raise
    except Exception as error:
        chain = list(_chain(error))
        if any(isinstance(one, errors.GatedRepoError) for one in chain) or "is a gated dataset" in str(error):
            page = ("datasets/" if kind == "data set" else "") + repository
            raise HubDenied(
                f"the {kind} {repository} is gated, and the hub did not accept the token",
                fix=f"request access on the page {page} of the hub, then log in with `hf auth login`",
            ) from error
        if any(isinstance(one, errors.RevisionNotFoundError) for one in chain):
            fix = "use a branch, a tag, or a commit of its page on the hub"
            raise HubNotFound(f"the {kind} {repository} has no revision `{revision}`", fix=fix) from error
        if (
            any(isinstance(one, errors.RepositoryNotFoundError) for one in chain)
            or type(error).__name__ == "DatasetNotFoundError"
        ):
            raise HubNotFound(
                f"{name} is neither a path here nor a {kind} on the hub",
                fix="correct the name or the path; for a private repository log in with `hf auth login`",
            ) from error
        if any(getattr(getattr(one, "response", None), "status_code", 0) in (401, 403) for one in chain):
            fix = "log in with `hf auth login`, with a token that may read it"
            raise HubDenied(f"the hub denied access to the {kind} {repository}: {_line(error)}", fix=fix) from error
        if any(_unreachable(one, errors) for one in chain):
            raise HubUnreachable(
                f"can't get the {kind} {repository}: the hub {_endpoint()} does not answer ({_line(chain[-1])})",
                fix="check the network and HF_ENDPOINT, or download it elsewhere and use its folder",
            ) from error
        raise HubNotFound(f"can't read the {kind} {name}: {_line(error)}", fix="check it on its page on the hub") from error


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _unreachable(error: BaseException, errors: Any) -> bool:
    status = getattr(getattr(error, "response", None), "status_code", 0)
    names = {cls.__name__ for cls in type(error).__mro__}
    offline = isinstance(error, (errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError, ConnectionError, TimeoutError))
    return offline or status >= 500 or bool(names & {"TransportError", "ConnectError", "TimeoutException"})


def _endpoint() -> str:
    return os.environ.get("HF_ENDPOINT", "huggingface.co")


def _line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]
