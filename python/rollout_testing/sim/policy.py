"""The weights, a vector of 64-bit words, and the functions of them."""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from rollout_workers.weights.transfer.publish_folder import replace

WORDS = 64
MODEL_TYPE = "rollout-sim"
TEMPLATE = (
    "{% if tools %}<tools>{% for t in tools %}{{ t.function.name }} {% endfor %}</tools>{% endif %}"
    "{% for m in messages %}{% if not loop.first %}{{ '\\n' }}{% endif %}{{ m.content }}{% endfor %}"
)
"""The chat template: the names of the tools, and the texts of the messages. `SimText.render` gives
the same."""
_TENSOR_FILE = "model.safetensors"
_MANIFEST_FILE = "rollout_weights.json"
_TOOLS, _TOOLS_MOST = "<tools>", 512

Words = NDArray[np.uint64]


class WeightsUnreadable(ValueError):
    """Replaces ``rollout_workers.weights.store.WeightsUnreadable``."""

    reason = "WEIGHTS_UNREADABLE"


@dataclass(frozen=True, slots=True)
class WeightsDigest:
    """Replaces ``rollout_workers.weights.WeightsDigest``."""

    root: str
    tensors: dict[str, str]


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Replaces ``rollout_workers.weights.store.TensorEntry``."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    digest: str


@dataclass(frozen=True, slots=True)
class FileEntry:
    """Replaces ``rollout_workers.weights.store.FileEntry``."""

    path: str
    bytes: int
    digest: str = ""


@dataclass(frozen=True, slots=True)
class WeightsManifest:
    """Replaces ``rollout_workers.weights.WeightsManifest``."""

    version: int
    digest: str
    tensors: tuple[TensorEntry, ...]
    files: tuple[FileEntry, ...]


def write_model(folder: Path, seed: int = 0, *, chat: bool = False) -> None:
    """Write a model of this type in the layout that the planner expects. The tokenizer's vocabulary
    is the bytes. chat: with the chat template of `SimText.render`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": MODEL_TYPE, "max_position_embeddings": 4096}))
    vocabulary = {chr(code): code for code in range(32, 127)}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "."}, "behavior": "Isolated", "invert": False},
        "model": {"type": "WordLevel", "vocab": vocabulary | {"<eos>": 0}, "unk_token": "?"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"}
    if chat:
        settings["chat_template"] = TEMPLATE
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    words = np.frombuffer(blake3(f"rollout.sim.model.{seed}".encode()).digest(8 * WORDS), "<u8")
    (folder / _TENSOR_FILE).write_bytes(_safetensors(words))


def read(folder: str | os.PathLike[str]) -> Words:
    """The weights in a folder of a model or a version. Raises ``ValueError`` for a model of another
    type, ``OSError``, :class:`WeightsUnreadable`."""
    path = Path(folder)
    kind = json.loads((path / "config.json").read_text()).get("model_type")
    if kind != MODEL_TYPE:
        raise ValueError(f"{path} has a model of type {kind!r}, but workers without a model need the type {MODEL_TYPE}")
    return read_version(path)


def read_version(folder: str | os.PathLike[str]) -> Words:
    """The weights in a version's folder. Raises :class:`WeightsUnreadable`."""
    path = Path(folder) / _TENSOR_FILE
    try:
        data = path.read_bytes()
    except OSError as error:
        raise WeightsUnreadable(f"{path}: {error}") from error
    if len(data) < 8 * WORDS:
        raise WeightsUnreadable(f"{path} is truncated")
    return np.frombuffer(data[-8 * WORDS :], "<u8").copy()


def read_manifest(folder: str | os.PathLike[str]) -> WeightsManifest:
    """Replaces ``rollout_workers.weights.read_manifest``, of which only the digest is used."""
    return WeightsManifest(0, digest(read_version(folder)).root, (), ())


def digest(words: Words) -> WeightsDigest:
    """The digest of the weights."""
    root = "blake3-" + blake3(b"rollout.sim.weights.v1" + words.astype("<u8").tobytes()).hexdigest()
    return WeightsDigest(root, {"words": root})


def seal(directory: Path) -> None:
    """Replaces ``rollout_workers.weights.seal``: the manifest has every digest already."""
    if not directory.is_dir():
        raise FileNotFoundError(f"{directory} does not exist")


def _entry(path: Path) -> FileEntry:
    data = path.read_bytes()
    return FileEntry(path.name, len(data), "blake3-" + blake3(data).hexdigest())


def write(folder: Path, words: Words, version: int, source: Path, fsync: bool) -> WeightsManifest:
    """Write a version's folder and rename it to its final name, like the real function."""
    staging = folder.parent / f".{folder.name}.{uuid.uuid4().hex}.tmp"
    staging.mkdir(parents=True)
    try:
        for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
            shutil.copyfile(source / name, staging / name)
        (staging / _TENSOR_FILE).write_bytes(_safetensors(words))
        made = digest(words)
        manifest = WeightsManifest(
            version,
            made.root,
            (TensorEntry("words", "uint64", (WORDS,), made.root),),
            tuple(_entry(path) for path in sorted(staging.iterdir())),
        )
        files = [asdict(file) for file in manifest.files]
        (staging / _MANIFEST_FILE).write_text(json.dumps({"version": version, "digest": made.root, "files": files}))
        if fsync:
            for path in staging.iterdir():
                sync(path)
            sync(staging)
        replace(staging, folder)
    except OSError:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    if fsync:
        sync(folder.parent)
    return manifest


def stage_folder(parent: Path, config_source_dir: Path, reserve: int = 0) -> Path:
    """Replaces ``rollout_workers.weights.stage_folder``; always fails, as weights this small need
    no reserved space."""
    raise OSError(f"{parent} takes nothing")


def sync(path: Path) -> None:
    """Sync a file or a folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sample(words: Words, prompt: Sequence[int], seed: int, most: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """The tokens of a completion (printable characters, then the end) and their logprobs, a
    function of the arguments only."""
    key = words.astype("<u8").tobytes() + np.asarray(prompt, "<i4").tobytes() + seed.to_bytes(8, "little")
    stream = blake3(b"rollout.sim.sample.v1" + key).digest(4 + 8 * most)
    length = 1 + int.from_bytes(stream[:4], "little") % most
    draws = np.frombuffer(stream[4 : 4 + 8 * length], "<u4").reshape(length, 2)
    ids = (32 + draws[:, 0] % 95).astype(np.int32)
    if length < most:
        ids[-1] = 0
    if (call := _call(prompt, key)) is not None:
        draws = np.frombuffer(blake3(b"rollout.sim.call.v1" + key).digest(8 * len(call)), "<u4").reshape(len(call), 2)
        ids, draws = call[:most], draws[:most]
    return ids, ((draws[:, 1] % 4096) / np.float32(-512)).astype(np.float32)


def _call(prompt: Sequence[int], key: bytes) -> NDArray[np.int32] | None:
    """The tokens of a call of a tool that the prompt offers, with the numbers ``a`` and ``b``: of
    four completions three are calls. None: no call."""
    start = bytes(at for at in prompt[:_TOOLS_MOST] if at < 128).decode()
    if not start.startswith(_TOOLS):
        return None
    calls, name, a, b = blake3(b"rollout.sim.call.v1" + key).digest(4)
    if not calls % 4:
        return None
    names = start[len(_TOOLS) :].partition("</tools>")[0].split()
    call = json.dumps({"name": names[name % len(names)], "arguments": {"a": a, "b": b}})
    return np.frombuffer(f"<tool_call>{call}</tool_call>\0".encode(), np.uint8).astype(np.int32)


def learn(words: Words, batch: Sequence[bytes], step: int) -> Words:
    """The weights after a step on a batch, in its order. They depend on every byte of every
    sample."""
    state = blake3(b"rollout.sim.step.v1" + step.to_bytes(8, "little") + words.astype("<u8").tobytes())
    for each in batch:
        state.update(len(each).to_bytes(8, "little") + each)
    return words + np.frombuffer(state.digest(8 * WORDS), "<u8")


def _safetensors(words: Words) -> bytes:
    header = json.dumps({"words": {"dtype": "U64", "shape": [WORDS], "data_offsets": [0, 8 * WORDS]}}).encode()
    return len(header).to_bytes(8, "little") + header + words.astype("<u8").tobytes()
