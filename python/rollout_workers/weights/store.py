"""Weights on disk: one folder per version, which ``AutoModelForCausalLM.from_pretrained`` loads.

    <dir>/model.safetensors       every tensor once, under its Hugging Face name
    <dir>/rollout_weights.json    the manifest: version, digest, tensors, and files
    <dir>/config.json, tokenizer* copies of the files of the run's model

A version of a run that trains adapters contains ``adapter_model.safetensors`` and
``adapter_config.json`` instead of ``model.safetensors`` and ``config.json``. The tensors and the
digest in its manifest are those of the merged weights.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import uuid
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from dataclasses import replace as replace_fields
from functools import lru_cache
from pathlib import Path

import torch
from blake3 import blake3
from torch import nn

from rollout_workers.weights.digest import PREFIX, WeightsDigest, weights_digest
from rollout_workers.weights.naming import dtype_name, named_weights
from rollout_workers.weights.tensor_file import read_tensors, write_tensors
from rollout_workers.weights.transfer.publish_folder import replace

TENSOR_FILE = "model.safetensors"
ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_SETTINGS = "adapter_config.json"
SHARD_INDEX_FILE = "model.safetensors.index.json"
MANIFEST_FILE = "rollout_weights.json"
_TOGETHER_BYTES = 16 << 20  # a thread only pays off above this size

# The files that from_pretrained reads in addition to the tensors. Other files of a model's folder,
# such as its weights, are not copied.
_COMPANIONS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)


class WeightsUnreadable(Exception):
    """A weights folder is missing, incomplete, or was not written by this module. The message names
    the folder and the problem."""

    reason = "WEIGHTS_UNREADABLE"


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor: Hugging Face name, dtype (``float32``), shape, ``blake3-<hex>`` of its node."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    digest: str


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file: path relative to the folder, size in bytes, and ``blake3-<hex>`` of its content.

    The digest of ``model.safetensors`` is empty until ``seal`` computes it.
    """

    path: str
    bytes: int
    digest: str = ""


@dataclass(frozen=True, slots=True)
class WeightsManifest:
    """A version of the policy: its number in the run, its digest, its tensors by name, and its
    files by path."""

    version: int
    digest: str
    tensors: tuple[TensorEntry, ...]
    files: tuple[FileEntry, ...]


def write_weights(
    directory: str | os.PathLike[str],
    weights: nn.Module | Iterable[tuple[str, torch.Tensor]],
    *,
    config_source_dir: str | os.PathLike[str],
    version: int,
    dtype: torch.dtype | None = None,
    fsync: bool = True,
    staging: Path | None = None,
) -> WeightsManifest:
    """Write ``weights`` as ``directory`` and return its manifest.

    The folder is renamed into place once it is complete, and replaces an existing one, because a
    step that is repeated after a crash writes the same version. With ``fsync`` files and both
    folders are durable when the call returns. ``dtype`` is the transport dtype of floating-point
    tensors; without it each tensor keeps its dtype. ``staging``: from ``stage_folder``, in the same
    folder as ``directory``; always consumed, even on failure. Raises ``FileNotFoundError`` if
    ``config_source_dir`` has no config.json, ``ValueError`` as ``weights_digest`` does, ``OSError``
    for the disk.
    """
    target, source = Path(directory), Path(config_source_dir)
    if not (source / "config.json").is_file():
        raise FileNotFoundError(f"{source} has no config.json; config_source_dir must be a model's folder")
    pairs = named_weights(weights) if isinstance(weights, nn.Module) else weights
    tensors = {name: _in_transport(tensor, dtype) for name, tensor in pairs}

    staging = staging or stage_folder(target.parent, source)
    try:
        staged = _staged(staging)
        digest = _write_and_digest(staging / TENSOR_FILE, tensors)
        written = FileEntry(TENSOR_FILE, (staging / TENSOR_FILE).stat().st_size)
        manifest = _manifest(tensors, digest, version, [*staged, written])
        (staging / MANIFEST_FILE).write_text(_as_json(manifest))
        if fsync:
            for path in (*(staging / file.path for file in manifest.files), staging / MANIFEST_FILE, staging):
                _fsync(path)
        replace(staging, target)
        if fsync:
            _fsync(target.parent)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    return manifest


def complete_folder(
    directory: str | os.PathLike[str], *, config_source_dir: str | os.PathLike[str], version: int
) -> WeightsManifest:
    """Add everything except the tensors to a folder that has ``model.safetensors``, and sync it.
    Returns the manifest. Raises ``FileNotFoundError`` if ``config_source_dir`` has no config.json,
    ``OSError``."""
    folder, source = Path(directory), Path(config_source_dir)
    if not (source / "config.json").is_file():
        raise FileNotFoundError(f"{source} has no config.json; config_source_dir must be a model's folder")
    staged = _copy_companions(source, folder)
    tensors = read_tensors(folder / TENSOR_FILE)
    written = FileEntry(TENSOR_FILE, (folder / TENSOR_FILE).stat().st_size)
    manifest = _manifest(tensors, weights_digest(tensors.items()), version, [*staged, written])
    (folder / MANIFEST_FILE).write_text(_as_json(manifest))
    for path in (*(folder / file.path for file in staged), folder / MANIFEST_FILE, folder):
        _fsync(path)
    return manifest


def write_adapter(
    directory: str | os.PathLike[str],
    adapters: Mapping[str, torch.Tensor],
    merged: tuple[WeightsDigest, Mapping[str, torch.Tensor]],
    *,
    settings: Callable[[Path], None],
    config_source_dir: str | os.PathLike[str],
    version: int,
) -> WeightsManifest:
    """Write only adapters to ``directory``, without fsync; otherwise like ``write_weights``.
    settings: writes ``adapter_config.json`` into a folder. merged: ``streamed_digest`` of the model
    with merged adapters."""
    target = Path(directory)
    staging = stage_folder(target.parent, config_source_dir)
    try:
        (staging / "config.json").unlink()  # otherwise from_pretrained treats the folder as a whole model
        staged = [file for file in _staged(staging) if file.path != "config.json"]
        settings(staging)
        write_tensors(staging / ADAPTER_FILE, {name: _in_transport(tensor, None) for name, tensor in adapters.items()})
        written = [_entry(staging / name) for name in (ADAPTER_FILE, ADAPTER_SETTINGS)]
        digest, layout = merged
        manifest = _manifest(layout, digest, version, [*staged, *written])
        (staging / MANIFEST_FILE).write_text(_as_json(manifest))
        replace(staging, target)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    return manifest


def stage_folder(parent: str | os.PathLike[str], config_source_dir: str | os.PathLike[str], reserve: int = 0) -> Path:
    """Create a folder in ``parent`` with everything except the tensors, for ``write_weights``. The
    files of the model are copied, so that an edit of the model does not change the version, nor the
    reverse.

    reserve: bytes to allocate for the file of tensors, because allocating shared memory takes
    longer than writing to it. Raises ``OSError``."""
    staging, source = Path(parent) / f".{uuid.uuid4().hex}.tmp", Path(config_source_dir)
    staging.mkdir(parents=True)
    try:
        entries = _copy_companions(source, staging)
        (staging / MANIFEST_FILE).write_text(json.dumps({"files": [asdict(entry) for entry in entries]}))
        if reserve and sys.platform == "linux":  # macOS has no posix_fallocate
            with open(staging / TENSOR_FILE, "wb") as file:
                os.posix_fallocate(file.fileno(), 0, reserve)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    return staging


def seal(directory: str | os.PathLike[str]) -> None:
    """Add the digests that the manifest of ``directory`` lacks, so that ``rollout audit`` can
    verify every file. Takes about 0.3 s per GB and core. Raises ``WeightsUnreadable``,
    ``OSError``."""
    folder = Path(directory)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} does not exist")
    manifest = read_manifest(folder)
    if all(file.digest for file in manifest.files):
        return
    files = tuple(file if file.digest else _entry(folder / file.path) for file in manifest.files)
    fresh = folder / f".{MANIFEST_FILE}.{uuid.uuid4().hex}"
    fresh.write_text(_as_json(replace_fields(manifest, files=files)))
    fresh.rename(folder / MANIFEST_FILE)


def read_weights(directory: str | os.PathLike[str]) -> dict[str, torch.Tensor]:
    """The tensors of a weights folder by name, memory-mapped: pages are read on first access.

    Works for any model folder with safetensors, in one file or in shards. The tensors
    share the file's pages copy-on-write; they stay valid after the folder is deleted. Digests are
    not verified: compare ``weights_digest`` with the manifest. Raises ``WeightsUnreadable``.
    """
    tensors: dict[str, torch.Tensor] = {}
    for path in _tensor_files(Path(directory)):
        try:
            tensors |= read_tensors(path)
        except (OSError, ValueError) as error:
            raise WeightsUnreadable(f"{path}: {error}") from error
    return tensors


def read_manifest(directory: str | os.PathLike[str]) -> WeightsManifest:
    """The manifest of a folder that ``write_weights`` wrote. Raises ``WeightsUnreadable``."""
    path = Path(directory) / MANIFEST_FILE
    try:
        raw = json.loads(path.read_text())
        return WeightsManifest(
            version=int(raw["version"]),
            digest=str(raw["digest"]),
            tensors=tuple(TensorEntry(t["name"], t["dtype"], tuple(t["shape"]), t["digest"]) for t in raw["tensors"]),
            files=tuple(FileEntry(f["path"], f["bytes"], f.get("digest", "")) for f in raw["files"]),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise WeightsUnreadable(f"{path}: {error!r}") from error


def _tensor_files(folder: Path) -> list[Path]:
    index = folder / SHARD_INDEX_FILE
    if not index.is_file():
        return [folder / TENSOR_FILE]
    try:
        return [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    except (ValueError, KeyError, AttributeError) as error:
        raise WeightsUnreadable(f"{index}: {error!r}") from error


def _write_and_digest(path: Path, tensors: Mapping[str, torch.Tensor]) -> WeightsDigest:
    """Write and hash at the same time if the tensors are large; both only read them (430 MB on 2
    cores: 0.26 s instead of 0.37 s)."""
    if sum(tensor.nbytes for tensor in tensors.values()) < _TOGETHER_BYTES:
        write_tensors(path, tensors)
        return weights_digest(tensors.items())
    with ThreadPoolExecutor(1, thread_name_prefix="write weights") as pool:
        writing = pool.submit(write_tensors, path, tensors)
        digest = weights_digest(tensors.items())
        writing.result()
    return digest


def _in_transport(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    if dtype is None and tensor.is_cpu and tensor.is_contiguous():
        return tensor
    tensor = tensor.detach().cpu()
    if dtype is not None and tensor.is_floating_point():
        tensor = tensor.to(dtype)
    return tensor.contiguous()


def _manifest(
    tensors: Mapping[str, torch.Tensor], digest: WeightsDigest, version: int, files: Iterable[FileEntry]
) -> WeightsManifest:
    return WeightsManifest(
        version=version,
        digest=digest.root,
        tensors=tuple(
            TensorEntry(name, dtype_name(tensor.dtype), tuple(tensor.shape), digest.tensors[name])
            for name, tensor in sorted(tensors.items())
        ),
        files=tuple(sorted(files, key=lambda file: file.path)),
    )


def _staged(folder: Path) -> list[FileEntry]:
    """The files that ``stage_folder`` has written."""
    return [FileEntry(**entry) for entry in json.loads((folder / MANIFEST_FILE).read_text())["files"]]


def _entry(path: Path) -> FileEntry:
    return FileEntry(
        path.name, path.stat().st_size, f"{PREFIX}{blake3(max_threads=blake3.AUTO).update_mmap(str(path)).hexdigest()}"
    )


def _copy_companions(source: Path, target: Path) -> list[FileEntry]:
    """Copy the files of a model that ``from_pretrained`` reads in addition to the tensors."""
    entries: list[FileEntry] = []
    for name in (*_COMPANIONS, *sorted(path.name for path in source.glob("*.py"))):  # of policies
        if (source / name).is_file():
            data, digest = _companion(source / name)
            (target / name).write_bytes(data)
            entries.append(FileEntry(name, len(data), digest))
    return entries


def _companion(path: Path) -> tuple[bytes, str]:
    """The content of a file and its digest."""
    found = path.stat()
    return _content(path, found.st_ino, found.st_mtime_ns, found.st_size)


@lru_cache(maxsize=32)  # each version of a run has the same files
def _content(path: Path, _inode: int, _changed: int, _bytes: int) -> tuple[bytes, str]:
    data = path.read_bytes()
    return data, PREFIX + blake3(data, max_threads=blake3.AUTO).hexdigest()


def _as_json(manifest: WeightsManifest) -> str:
    # One line, with the unchanging parts cached, because every step of a small model waits for
    # this.
    tensors = ", ".join([f'{_described(t.name, t.dtype, t.shape)}, "digest": "{t.digest}"}}' for t in manifest.tensors])
    files = [{"path": f.path, "bytes": f.bytes, "digest": f.digest} for f in manifest.files]
    whole = json.dumps({"version": manifest.version, "digest": manifest.digest, "files": files})
    return f'{whole[:-1]}, "tensors": [{tensors}]}}\n'


@lru_cache(maxsize=4096)
def _described(name: str, dtype: str, shape: tuple[int, ...]) -> str:
    """A tensor as JSON, without its digest and the closing brace."""
    return json.dumps({"name": name, "dtype": dtype, "shape": shape})[:-1]


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
