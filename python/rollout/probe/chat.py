"""Renders prompts with the chat template of a model's folder, without transformers."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from rollout.dataset import Prompt
from rollout.errors import Place
from rollout.probe.tokenizer import BadModel, Json


def chat_renderer(folder: Path) -> Callable[[Prompt, bool], str]:
    """A function that renders a prompt with the folder's chat template, as transformers does. The
    second argument adds the generation prompt of the assistant."""
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
            raise BadModel(f"the chat template rejects a prompt: {error}", place=Place(str(source))) from error

    return render


def to_json(value: Any, **options: Any) -> str:
    """The ``tojson`` of chat templates, which does not escape HTML."""
    return json.dumps(value, ensure_ascii=False, **options)


def chat_template(folder: Path) -> tuple[str, Path]:
    """The chat template and its file."""
    file = folder / "chat_template.jinja"
    if file.exists():
        return file.read_text(encoding="utf-8"), file
    file = folder / "tokenizer_config.json"
    template = json.loads(file.read_text(encoding="utf-8")).get("chat_template") if file.exists() else None
    if isinstance(template, list):  # several templates, by name
        named = {entry["name"]: entry["template"] for entry in cast(list[dict[str, str]], template)}
        template = named.get("default")
    if not isinstance(template, str):
        fix = "set `chat_template = false` in [model], or use an instruction-tuned model"
        raise BadModel("the tokenizer has no chat template", fix=fix, place=Place(str(folder)))
    return template, file


def special_tokens(folder: Path) -> dict[str, str]:
    """Texts of the special tokens by name (`bos_token`, ...), for chat templates."""
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
