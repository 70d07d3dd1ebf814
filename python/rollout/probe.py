"""The planner's dry calls, in a process of their own: ``python -m rollout.probe``, JSON in, JSON out.

The planner can't import a user's reward or a tokenizer itself, and whatever such code does must not hurt it. So this
process reads one request from stdin, writes one answer to what was stdout, and leaves. What the user's code prints goes to
stderr and can't spoil the answer; a call that hangs is reported by a thread with the line at which it hangs. Imports no
torch: the answer is there within a second.

Request (every part may be absent)::

    {"packages": ["torch", ...],
     "reward": {"plugin": "reward.py:exact" (or "expression": "..."), "base_dir": "/...", "timeout_seconds": 30.0,
                "samples": [{"prompt": "...", "completion": "...", "row": {...}}], "model": "/...",
                "files": [{"path": "/...", "name": "train.jsonl"}]},
     "tokenizer": {"model": "/...", "chat_template": false,
                   "files": [{"path": "/...", "prompt_field": "prompt", "answer_fields": [], "limit": 1920}]},
     "teacher": {"model": "/...", "base_url": "http://...", "name": "teacher", "api_key": "env:KEY", "protocol": "echo",
                 "timeout_seconds": 60.0, "prompt": "..."},
     "wandb_key": true}

Answer::

    {"python": "3.11.7", "packages": {"torch": "2.15.0", "absent": null},
     "reward": {"scores": [{"reward": 1.0, "metrics": {}}], "parts": false, "files": ["/.../reward.py"], "seconds": 0.1}
               | {"error": ...},
     "tokenizer": {"files": [{"longest": 12, "rows": 9500, "over": 2, "examples": [{"row": 7, "tokens": 2101}], "empty": [],
                              "unknown": 1, "strange": [{"row": 3, "text": "é", "field": "prompt"}]}]}
                  | {"error": ...},
     "teacher": {"tokens": 12} | {"error": ...},
     "wandb_key": false}

with ``error`` being ``{"reason", "message", "mend", "file", "line", "column", "text"}``.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib.metadata
import itertools
import json
import netrc
import os
import platform
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlsplit

from rollout.dataset import Prompt, rows
from rollout.errors import Place, RolloutError
from rollout.plugin import RewardFunction, RewardTimeout, Sample, call_reward, load_reward, split_plugin

if TYPE_CHECKING:
    from rollout.expression import FieldUse

Json = dict[str, Any]

EXAMPLES = 20  # rows named one by one; the others are counted
CHUNK = 4096  # rows tokenised at a time


def main() -> None:
    """Answer the request on stdin."""
    answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # prints of the user's code, and of C code below it, end on stderr
    request: Json = json.load(sys.stdin)
    once = threading.Lock()

    def reply(body: Json) -> None:
        if once.acquire(blocking=False):  # the watchdog and the call may both have something to say
            json.dump(body, answer)
            answer.flush()

    body: Json = {"python": platform.python_version(), "packages": versions(request.get("packages", []))}
    if request.get("wandb_key"):
        body["wandb_key"] = has_wandb_key()
    if "tokenizer" in request:
        body["tokenizer"] = guarded(lambda: measure(request["tokenizer"]))
    if "teacher" in request:
        body["teacher"] = guarded(lambda: ask_teacher(request["teacher"]))
    if "reward" in request:

        def hung(error: RewardTimeout) -> None:
            reply(body | {"reward": {"error": describe(error)}})
            os._exit(0)

        def began() -> None:  # what starts and reads until then is not the reward's time
            answer.write("\n")
            answer.flush()

        body["reward"] = guarded(lambda: dry_call(request["reward"], hung, began))
    reply(body)
    sys.stdout.flush()
    os._exit(0)  # threads that the user's code left behind keep nobody waiting


def versions(names: list[str]) -> dict[str, str | None]:
    """The installed version of each distribution, ``None`` where it is absent; imports nothing."""
    found: dict[str, str | None] = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def has_wandb_key() -> bool:
    """Whether W&B's library will find a key: in its variable, or in the netrc file that ``wandb login`` writes."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def guarded(part: Callable[[], Json]) -> Json:
    """What ``part`` answers, or the error that it raised."""
    try:
        return part()
    except RolloutError as error:
        return {"error": describe(error)}
    except Exception as error:
        lines = traceback.format_exception_only(error)
        return {"error": {"reason": "PROBE_FAILED", "message": " ".join("".join(lines).split()), "mend": ""}}


def describe(error: RolloutError) -> Json:
    """An error as JSON."""
    place = error.place or Place("")
    return {
        "reason": error.reason,
        "message": error.message,
        "mend": error.mend,
        "file": place.file,
        "line": place.line,
        "column": place.column,
        "text": place.text,
    }


def dry_call(request: Json, hung: Callable[[RewardTimeout], None], began: Callable[[], None]) -> Json:
    """Import the reward and call it once. ``began`` is told before that, ``hung`` from another thread when it takes too long."""
    expression, base_dir = request.get("expression"), request["base_dir"]
    plugin = request.get("plugin", "")
    limit = float(request["timeout_seconds"])
    folders = {Path(base_dir)}
    if not expression:
        folders.add(Path(os.path.abspath(os.path.join(base_dir, split_plugin(plugin)[0]))).parent)
    caller = threading.get_ident()

    def watch(what: str) -> threading.Timer:
        def bark() -> None:
            frame = sys._current_frames()[caller]  # pyright: ignore[reportPrivateUsage]
            frames = traceback.extract_stack(frame)
            hung(
                RewardTimeout(
                    f"{what} took longer than {limit:g} s",
                    mend="make it faster or raise `reward.timeout_seconds`",
                    place=last_of(frames, folders),
                )
            )

        timer = threading.Timer(limit, bark)
        timer.daemon = True
        timer.start()
        return timer

    samples = samples_of(request)
    function: RewardFunction
    if expression:
        function = compiled(expression, request.get("files", []))
        began()
    else:
        began()
        timer = watch(f"importing {split_plugin(plugin)[0]}")
        function = load_reward(plugin, base_dir)
        timer.cancel()
    start = time.monotonic()
    timer = watch(f"`{'reward.expression' if expression else split_plugin(plugin)[1]}`")
    scores = call_reward(function, samples)
    timer.cancel()
    return {
        "scores": [{"reward": score.reward, "metrics": dict(score.metrics)} for score in scores],
        "parts": any(score.token_rewards or score.steps for score in scores),
        "files": [] if expression else local_files(folders),
        "seconds": time.monotonic() - start,
    }


def samples_of(request: Json) -> list[Sample]:
    """The samples, with tokens where the model's tokenizer is at hand."""
    samples: list[Json] = request["samples"]
    ids: list[list[int]] = [[] for _ in samples]
    if request.get("model"):
        with contextlib.suppress(BadModel):  # which another part says
            tokenizer = tokenizer_of(Path(request["model"]))
            texts = [sample["completion"] for sample in samples]
            ids = [encoded.ids for encoded in tokenizer.encode_batch(texts, add_special_tokens=False)]
    return [Sample(s["prompt"], s["completion"], s["row"], tokens) for s, tokens in zip(samples, ids, strict=True)]


def compiled(text: str, files: list[Json]) -> RewardFunction:
    """The expression, all of whose fields the rows have. Raises ``ExpressionError``."""
    from rollout.expression import Expression

    expression = Expression(text)
    for use in expression.fields:
        for file in files:
            if not use.guarded:
                check_field(use, file)
    return expression


def check_field(use: FieldUse, file: Json) -> None:
    """Raises ``ExpressionError`` where a row lacks a field that the expression takes for granted."""
    from rollout.expression import ExpressionError

    for number, row in enumerate(rows(file["path"]), 1):
        if use.name in row:
            continue
        near = difflib.get_close_matches(use.name, row, n=1)
        mend = f"did you mean `{near[0]}`?" if near else f"the row has {', '.join(f'`{name}`' for name in row)}"
        if number > 1:
            mend = f"ask first: `has(row.{use.name}) ? ... : 0.0`"
        place = Place("reward.expression", use.line, use.column)
        raise ExpressionError(f"row {number} of {file['name']} has no `{use.name}`", mend=mend, place=place)


def last_of(frames: traceback.StackSummary, folders: set[Path]) -> Place | None:
    """The innermost frame that lies in the user's folders."""
    for frame in reversed(frames):
        if is_local(Path(frame.filename), folders):
            text = (frame.line or "").strip()
            return Place(frame.filename, frame.lineno or 0, 1 + _indent(frame.filename, frame.lineno), text)
    return None


def _indent(filename: str, number: int | None) -> int:
    import linecache

    line = linecache.getline(filename, number or 0)
    return len(line) - len(line.lstrip())


def local_files(folders: set[Path]) -> list[str]:
    """Source files of loaded modules that lie in the user's folders, sorted."""
    found: set[str] = set()
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file and name.partition(".")[0] not in ("rollout", "__main__") and is_local(Path(file), folders):
            found.add(os.path.abspath(file))
    return sorted(found)


def is_local(path: Path, folders: set[Path]) -> bool:
    """Whether a source file is the user's own, and not an installed package's."""
    if "site-packages" in path.parts or path.is_relative_to(Path(__file__).parent):
        return False
    return path.suffix == ".py" and any(path.is_relative_to(folder) for folder in folders)


def measure(request: Json) -> Json:
    """Tokenise every prompt and name those that leave no room for a completion."""
    folder = Path(request["model"])
    tokenizer = tokenizer_of(folder)
    render = chat_renderer(folder) if request["chat_template"] else None
    return {"files": [measure_file(file, tokenizer, render) for file in request["files"]]}


def ask_teacher(request: Json) -> Json:
    """Ask a teacher's endpoint once, about the tokens of a prompt. Raises ``TeacherError``, :class:`SecretMissing`."""
    from rollout.teacher import TeacherEndpoint

    tokenizer = tokenizer_of(Path(request["model"]))
    ids: list[int] = tokenizer.encode(request["prompt"]).ids
    ids = ids if len(ids) > 1 else [*ids, 0, 0][:2]
    endpoint = TeacherEndpoint(
        request["base_url"],
        request["name"],
        api_key=secret(request["api_key"]),
        protocol=request["protocol"],
        timeout_seconds=request["timeout_seconds"],
        pieces=lambda token: [str(tokenizer.id_to_token(token)), tokenizer.decode([token], skip_special_tokens=False)],
    )
    return {"tokens": len(endpoint.logprobs(ids, 1))}


class SecretMissing(RolloutError):
    """A reference names no secret."""

    reason = "SECRET_REFERENCE"


def secret(reference: str) -> str:
    """What ``env:NAME`` or ``file:PATH`` holds. Raises :class:`SecretMissing`."""
    kind, _, rest = reference.partition(":")
    try:
        text = (os.environ.get(rest, "") if kind == "env" else Path(rest).read_text() if rest else "").strip()
    except OSError as error:
        raise SecretMissing(f"can't read {rest}: {error.strerror}", mend="correct `api_key`") from error
    if reference and not text:
        raise SecretMissing(f"`{reference}` holds nothing", mend="set it where rolloutd runs")
    return text


def tokenizer_of(folder: Path) -> Any:
    """The tokenizer of a model's folder. Raises :class:`BadModel`."""
    from tokenizers import Tokenizer  # a small package of its own: transformers would take seconds

    try:
        return Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:
        mend = "save the tokenizer again with `AutoTokenizer.from_pretrained(...).save_pretrained(...)`"
        raise BadModel(f"the tokenizer can't be read: {error}", mend=mend, place=Place(str(folder / "tokenizer.json"))) from error


class BadModel(RolloutError):
    """The model's folder lacks something or holds something that can't be read."""

    reason = "BAD_MODEL"


def measure_file(file: Json, tokenizer: Any, render: Callable[[Prompt, bool], str] | None) -> Json:
    """Count the tokens of each row: of its prompt, and of its longest completion and the end where ``answer_fields`` name any."""
    over: list[Json] = []
    empty: list[int] = []
    strange: list[Json] = []
    counted, longest, too_long, unknown = 0, 0, 0, 0
    stand_in = unknown_token(tokenizer)
    answer_fields: list[str] = file.get("answer_fields") or []
    for chunk in chunks(rows(file["path"]), CHUNK):
        talks = [bool(answer_fields) and answer_fields[0] not in row for row in chunk]  # its messages end with the answer
        texts = [text_of(row[file["prompt_field"]], render, not talk) for row, talk in zip(chunk, talks, strict=True)]
        encoded = tokenizer.encode_batch(texts, add_special_tokens=render is None)
        lengths = [len(e) for e in encoded]
        found = [unknown_text(text, ids, stand_in, file["prompt_field"]) for text, ids in zip(texts, encoded, strict=True)]
        longest_of = [0] * len(chunk)
        for field in answer_fields:
            texts = [row.get(field, "") for row in chunk]
            answers = tokenizer.encode_batch(texts, add_special_tokens=False)
            longest_of = [max(before, len(answer) + 1) for before, answer in zip(longest_of, answers, strict=True)]
            found = [f or unknown_text(t, ids, stand_in, field) for f, t, ids in zip(found, texts, answers, strict=True)]
        for row, first in enumerate(found, counted):
            if first is not None:
                unknown += 1
                strange.append({"row": row} | first)
        lengths = [prompt + answer for prompt, answer in zip(lengths, longest_of, strict=True)]
        for row, length in enumerate(lengths, counted):
            longest = max(longest, length)
            if length == 0:
                empty.append(row)
            if length > file["limit"]:
                too_long += 1
                over.append({"row": row, "tokens": length})
        counted += len(chunk)
        del over[EXAMPLES:], empty[EXAMPLES:], strange[EXAMPLES:]
    return {"rows": counted, "longest": longest, "over": too_long, "examples": over, "empty": empty} | {
        "unknown": unknown,
        "strange": strange,
    }


def unknown_text(text: str, encoded: Any, stand_in: int | None, field: str) -> Json | None:
    """The first piece of a field's text for which the unknown token stands, ``{"text", "field"}``; ``None``: there is none."""
    if stand_in is None or stand_in not in encoded.ids:
        return None
    start, end = encoded.offsets[encoded.ids.index(stand_in)]
    return {"text": text[start:end], "field": field}


def unknown_token(tokenizer: Any) -> int | None:
    """The token that stands in for what the vocabulary has not; ``None`` where it has everything."""
    model: Json = json.loads(tokenizer.to_str())["model"]
    token, number = model.get("unk_token"), model.get("unk_id")
    return tokenizer.token_to_id(token) if token else number


def text_of(prompt: Prompt, render: Callable[[Prompt, bool], str] | None, answering: bool = True) -> str:
    """A prompt as the tokenizer gets it. answering: up to where the assistant speaks."""
    return render(prompt, answering) if render else cast(str, prompt)


def chunks(items: Iterator[Json], size: int) -> Iterator[list[Json]]:
    """Lists of at most ``size`` items."""
    while batch := list(itertools.islice(items, size)):
        yield batch


def chat_renderer(folder: Path) -> Callable[[Prompt, bool], str]:
    """A function that renders a prompt through the folder's chat template, as transformers does, and then, where the second
    argument says so, what has the assistant speak."""
    from jinja2.exceptions import TemplateError
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    template, source = chat_template(folder)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    environment: Any = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = to_json
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": time.strftime}
    try:
        compiled = environment.from_string(template)
    except TemplateError as error:
        raise BadModel(f"the chat template can't be read: {error}", place=Place(str(source))) from error
    tokens = special_tokens(folder)

    def render(prompt: Prompt, answering: bool) -> str:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        try:
            return compiled.render(messages=messages, add_generation_prompt=answering, **tokens)
        except TemplateError as error:
            raise BadModel(f"the chat template refuses a prompt: {error}", place=Place(str(source))) from error

    return render


def to_json(value: Any, **options: Any) -> str:
    """The ``tojson`` of chat templates, which escapes no HTML."""
    return json.dumps(value, ensure_ascii=False, **options)


def chat_template(folder: Path) -> tuple[str, Path]:
    """The chat template and the file that it stands in."""
    file = folder / "chat_template.jinja"
    if file.exists():
        return file.read_text(encoding="utf-8"), file
    file = folder / "tokenizer_config.json"
    template = json.loads(file.read_text(encoding="utf-8")).get("chat_template") if file.exists() else None
    if isinstance(template, list):  # several, by name
        named = {entry["name"]: entry["template"] for entry in cast(list[dict[str, str]], template)}
        template = named.get("default")
    if not isinstance(template, str):
        mend = "set `chat_template = false` in [model], or use an instruction-tuned model"
        raise BadModel("the tokenizer has no chat template", mend=mend, place=Place(str(folder)))
    return template, file


def special_tokens(folder: Path) -> dict[str, str]:
    """Texts of the special tokens by name (`bos_token`, ...), as a chat template sees them."""
    file = folder / "tokenizer_config.json"
    if not file.exists():
        return {}
    config: Json = json.loads(file.read_text(encoding="utf-8"))
    found: dict[str, str] = {}
    for name, token in config.items():
        text = cast(Json, token).get("content") if isinstance(token, dict) else token
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found


if __name__ == "__main__":
    main()
