"""The families of chat templates: which forms of calls and reasoning their models write.

The family is found by the markers in the chat template of the tokenizer. To add one, add a row to
``FAMILIES``; the first row whose markers are all in the template is chosen.
"""

# ruff: noqa: RUF001 (DeepSeek's tokens have such characters)

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from rollout.errors import RolloutError
from rollout_workers.chat import harmony
from rollout_workers.chat.calls import (
    BARE_JSON,
    MISTRAL,
    PYTHON_TAG,
    PYTHONIC,
    REQUIRED,
    Form,
    Schemas,
    deepseek_body,
    glm_body,
    json_body,
    tagged,
    xml_body,
)
from rollout_workers.chat.parser import Parser, TagParser, Thinking

_THINK = Thinking("<think>", "</think>")
_MISTRAL_THINK = Thinking("[THINK]", "[/THINK]")
_TOOL_CALL = "<tool_call>", "</tool_call>"
_DEEPSEEK_CALLS = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_GLM_MARKERS = (*_TOOL_CALL, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
_DEEPSEEK_MARKERS = (*_DEEPSEEK_CALLS, "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>")


@dataclass(frozen=True, slots=True)
class Family:
    """One family. template: markers of its chat templates. thinking: tags of its reasoning, parsed
    if the template has one of them. forms: of its calls. tokens: further special tokens that its
    parser reads. id_length: characters of the id of a call that its template requires; 0: any."""

    name: str
    template: Sequence[str]
    forms: Sequence[Form] = ()
    thinking: Thinking = _THINK
    tokens: Sequence[str] = ()
    id_length: int = 0

    @property
    def markers(self) -> frozenset[str]:
        """Special tokens that are part of the text for the parser."""
        tags = [form.opening for form in self.forms]
        return frozenset((*tags, *self.tokens, self.thinking.opening, self.thinking.closing))


FAMILIES = (
    Family("harmony", ("<|channel|>",), tokens=harmony.MARKERS),
    Family("deepseek", _DEEPSEEK_CALLS[:1], (tagged(*_DEEPSEEK_CALLS, deepseek_body),), tokens=_DEEPSEEK_MARKERS),
    Family("mistral", ("[TOOL_CALLS]",), (MISTRAL,), _MISTRAL_THINK, ("[ARGS]", "[CALL_ID]"), id_length=9),
    Family("glm", ("<arg_key>",), (tagged(*_TOOL_CALL, glm_body),), tokens=_GLM_MARKERS),
    Family("qwen3_coder", ("<tool_call>", "<function="), (tagged(*_TOOL_CALL, xml_body, json_body),), tokens=_TOOL_CALL),
    Family("hermes", ("<tool_call>",), (tagged(*_TOOL_CALL, json_body),), tokens=_TOOL_CALL),
    Family("llama_pythonic", ("<|python_start|>",), (PYTHONIC,)),
    Family("llama_pythonic", ("<|start_header_id|>", "[func_name1("), (PYTHONIC,)),
    Family("llama_json", ("<|start_header_id|>", "parameters"), (PYTHON_TAG, BARE_JSON)),
    Family("plain", (), (tagged(*_TOOL_CALL, json_body),), tokens=_TOOL_CALL),
)  # fmt: skip


class UnknownFamily(RolloutError):
    """No family has this name."""

    reason: ClassVar[str] = "UNKNOWN_CHAT_FAMILY"


def family_of(template: str, name: str = "") -> Family:
    """The family of a chat template, or the one with this name. Raises ``UnknownFamily``."""
    for family in FAMILIES:
        if family.name == name if name else all(marker in template for marker in family.template):
            return family
    names = ", ".join(dict.fromkeys(family.name for family in FAMILIES))
    raise UnknownFamily(f"chat family {name!r} is unknown", fix=f"use one of {names}")


@dataclass(frozen=True, slots=True)
class ParserChoice:
    """Makes the parsers of one tokenizer. template: its chat template. override: a family in place
    of the template's."""

    template: str
    override: str = ""

    @property
    def family(self) -> Family:
        return family_of(self.template, self.override)

    def parser(self, schemas: Schemas, prompt: str, *, required: bool = False, continues: bool = False) -> Parser:
        """A parser for one completion. schemas: of the tools that may be called; calls stay text
        without any. prompt: its end. required: the completion is a list of calls as JSON.
        continues: the prompt ends inside of the message."""
        family = self.family
        if required:
            return TagParser(None, REQUIRED, schemas)
        if family.name == "harmony":
            return harmony.HarmonyParser(prompt, calls=bool(schemas))
        thinks = self.override or any(tag in self.template for tag in (family.thinking.opening, family.thinking.closing))
        thinking = family.thinking if thinks else None
        opened = thinking is not None and thinking.opened_by(prompt, continues)
        return TagParser(thinking, family.forms if schemas else (), schemas, reasoning=opened)
