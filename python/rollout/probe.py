"""The planner's dry calls, in a process of their own: ``python -m rollout.probe``, JSON in, JSON out.

The planner can't import a user's reward or a tokenizer itself, and whatever such code does must not hurt it. So this
process reads one request from stdin, writes one answer to what was stdout, and leaves. What the user's code prints goes to
stderr and can't spoil the answer; a call that hangs is reported by a thread with the line at which it hangs. Imports no
torch: the answer is there within a second.

Request (every part may be absent)::

    {"packages": ["torch", ...],
     "reward": {"plugin": "reward.py:exact", "base_dir": "/...", "timeout_seconds": 30.0,
                "samples": [{"prompt": "...", "completion": "...", "row": {...}}]},
     "tokenizer": {"model": "/...", "chat_template": false,
                   "files": [{"path": "/...", "prompt_field": "prompt", "answer_fields": [], "limit": 1920}]}}

Answer::

    {"python": "3.11.7", "packages": {"torch": "2.15.0", "absent": null},
     "reward": {"scores": [{"reward": 1.0, "metrics": {}}], "files": ["/.../reward.py"], "seconds": 0.1} | {"error": ...},
     "tokenizer": {"files": [{"longest": 12, "rows": 9500, "over": 2, "examples": [{"row": 7, "tokens": 2101}], "empty": []}]}
                  | {"error": ...}}

with ``error`` being ``{"reason", "message", "mend", "file", "line", "column", "text"}``.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import os
import platform
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

from rollout.dataset import Prompt, rows
from rollout.errors import Place, RolloutError
from rollout.plugin import RewardTimeout, Sample, call_reward, load_reward, split_plugin

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
    if "tokenizer" in request:
        body["tokenizer"] = guarded(lambda: measure(request["tokenizer"]))
    if "reward" in request:

        def hung(error: RewardTimeout) -> None:
            reply(body | {"reward": {"error": describe(error)}})
            os._exit(0)

        body["reward"] = guarded(lambda: dry_call(request["reward"], hung))
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


def dry_call(request: Json, hung: Callable[[RewardTimeout], None]) -> Json:
    """Import the reward and call it once. ``hung`` is told from another thread when that takes too long."""
    plugin, base_dir = request["plugin"], request["base_dir"]
    limit = float(request["timeout_seconds"])
    samples = [Sample(s["prompt"], s["completion"], s["row"]) for s in request["samples"]]
    folders = {Path(os.path.abspath(os.path.join(base_dir, split_plugin(plugin)[0]))).parent, Path(base_dir)}
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

    timer = watch(f"importing {split_plugin(plugin)[0]}")
    function = load_reward(plugin, base_dir)
    timer.cancel()
    began = time.monotonic()
    timer = watch(f"`{split_plugin(plugin)[1]}`")
    scores = call_reward(function, samples)
    timer.cancel()
    return {
        "scores": [{"reward": score.reward, "metrics": dict(score.metrics)} for score in scores],
        "files": local_files(folders),
        "seconds": time.monotonic() - began,
    }


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
    from tokenizers import Tokenizer  # a small package of its own: transformers would take seconds

    folder = Path(request["model"])
    try:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:
        mend = "save the tokenizer again with `AutoTokenizer.from_pretrained(...).save_pretrained(...)`"
        raise BadModel(f"the tokenizer can't be read: {error}", mend=mend, place=Place(str(folder / "tokenizer.json"))) from error
    render = chat_renderer(folder) if request["chat_template"] else None
    return {"files": [measure_file(file, tokenizer, render) for file in request["files"]]}


class BadModel(RolloutError):
    """The model's folder lacks something or holds something that can't be read."""

    reason = "BAD_MODEL"


def measure_file(file: Json, tokenizer: Any, render: Callable[[Prompt], str] | None) -> Json:
    """Count the tokens of each row: of its prompt, and of its longest completion and the end where ``answer_fields`` name any."""
    over: list[Json] = []
    empty: list[int] = []
    counted, longest, too_long = 0, 0, 0
    answer_fields: list[str] = file.get("answer_fields") or []
    for chunk in chunks(rows(file["path"]), CHUNK):
        texts = [text_of(row[file["prompt_field"]], render) for row in chunk]
        lengths = [len(e) for e in tokenizer.encode_batch(texts, add_special_tokens=render is None)]
        longest_of = [0] * len(chunk)
        for field in answer_fields:
            answers = tokenizer.encode_batch([row[field] for row in chunk], add_special_tokens=False)
            longest_of = [max(before, len(answer) + 1) for before, answer in zip(longest_of, answers, strict=True)]
        lengths = [prompt + answer for prompt, answer in zip(lengths, longest_of, strict=True)]
        for row, length in enumerate(lengths, counted):
            longest = max(longest, length)
            if length == 0:
                empty.append(row)
            if length > file["limit"]:
                too_long += 1
                over.append({"row": row, "tokens": length})
        counted += len(chunk)
        del over[EXAMPLES:], empty[EXAMPLES:]
    return {"rows": counted, "longest": longest, "over": too_long, "examples": over, "empty": empty}


def text_of(prompt: Prompt, render: Callable[[Prompt], str] | None) -> str:
    """A prompt as the tokenizer gets it."""
    return render(prompt) if render else cast(str, prompt)


def chunks(items: Iterator[Json], size: int) -> Iterator[list[Json]]:
    """Lists of at most ``size`` items."""
    while batch := list(itertools.islice(items, size)):
        yield batch


def chat_renderer(folder: Path) -> Callable[[Prompt], str]:
    """A function that renders a prompt through the folder's chat template, as transformers does."""
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

    def render(prompt: Prompt) -> str:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        try:
            return compiled.render(messages=messages, add_generation_prompt=True, **tokens)
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
