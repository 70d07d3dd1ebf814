"""The calls and the reasoning of each family: golden messages, however the text is divided."""

# ruff: noqa: RUF001, E501 (DeepSeek's tokens have such characters; a case is a line)

from __future__ import annotations

import json
from dataclasses import dataclass, field

import pytest

from rollout_workers.chat.calls import Call, Schemas
from rollout_workers.chat.families import FAMILIES, ParserChoice, UnknownFamily, family_of
from rollout_workers.chat.parser import Delta, Parser

SCHEMAS: Schemas = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "units": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "exact": {"type": "boolean"},
            "at": {"type": "object"},
        },
    },
    "now": {"type": "object", "properties": {}},
}


@dataclass(frozen=True)
class Case:
    """One completion of a family and the message that it is."""

    family: str
    name: str
    text: str
    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, object]] = field(default_factory=list)
    prompt: str = ""
    tools: bool = True
    required: bool = False


PARIS = {"city": "Paris", "days": 3}
HERMES = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris", "days": 3}}\n</tool_call>'
HERMES_NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
XML = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
    "</function>\n</tool_call>"
)
GLM = (
    "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>"
)
LLAMA = '{"name": "weather", "parameters": {"city": "Paris", "days": 3}}'
V3 = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
    '{"city": "Paris", "days": 3}\n```<｜tool▁call▁end｜>'
)
V31 = '<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Paris", "days": 3}<｜tool▁call▁end｜>'
V3_END = "<｜tool▁calls▁end｜>"
HARMONY = "<|start|>user<|message|>Hi<|end|><|start|>assistant"
HARMONY_CALL = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Paris", "days": 3}<|call|>'
CASES = [
    Case("hermes", "text", " Hello,\n  world. \n", " Hello,\n  world. \n"),
    Case("hermes", "one call", HERMES, calls=[("weather", PARIS)]),
    Case("hermes", "text and two calls", f"Let me see.\n{HERMES}\n{HERMES_NOW}\n", "Let me see.", "", [("weather", PARIS), ("now", {})]),
    Case("hermes", "text after a call", f"{HERMES}\nDone.", "\nDone.", calls=[("weather", PARIS)]),
    Case("hermes", "without tools", HERMES, HERMES, tools=False),
    Case("hermes", "not JSON", "A <tool_call>\n{'name': weather}\n</tool_call> B", "A <tool_call>\n{'name': weather}\n</tool_call> B"),
    Case("hermes", "no name", '<tool_call>{"arguments": {}}</tool_call>', '<tool_call>{"arguments": {}}</tool_call>'),
    Case("hermes", "cut", HERMES[:40], HERMES[:40]),
    Case("hermes", "no closing tag", HERMES.removesuffix("\n</tool_call>"), calls=[("weather", PARIS)]),
    Case("hermes", "a malformed call before a good one", f"<tool_call>oh</tool_call>\n{HERMES}", "<tool_call>oh</tool_call>", calls=[("weather", PARIS)]),
    Case(
        "hermes",
        "tags and brackets in arguments",
        '<tool_call>{"name": "weather", "arguments": {"city": "}</tool_call>\\"{é"}}</tool_call>',
        calls=[("weather", {"city": '}</tool_call>"{é'})],
    ),
    Case("hermes", "arguments as text", '<tool_call>{"name": "now", "arguments": "{}"}</tool_call>', calls=[("now", {})]),
    Case("hermes", "not a number", '<tool_call>{"name": "now", "arguments": {"a": NaN}}</tool_call>', '<tool_call>{"name": "now", "arguments": {"a": NaN}}</tool_call>'),
    Case("hermes", "a tag that is text", "x < y and <tool_cal", "x < y and <tool_cal"),
    Case("hermes", "thinking", "<think>\nHm, 2.\n\nYes.\n</think>\n\nIt is 4.", "It is 4.", "Hm, 2.\n\nYes."),
    Case("hermes", "thinking that the prompt began", "Hm.\n</think>\n\nIt is 4.", "It is 4.", "Hm.", prompt="assistant\n<think>\n"),
    Case("hermes", "thinking that never ends", "<think>\nHm </thin", "", "Hm </thin"),
    Case("hermes", "empty thinking", "<think>\n\n</think>\n\nIt is 4.", "It is 4."),
    Case("hermes", "thinking that the prompt ended", "It is 4.", "It is 4.", prompt="assistant\n<think>\n\n</think>\n\n"),
    Case("hermes", "thinking and a call", f"<think>\nHm.\n</think>\n\n{HERMES}", "", "Hm.", [("weather", PARIS)]),
    Case("hermes", "calls in thinking are reasoning", f"<think>{HERMES}</think>No.", "No.", HERMES),
    Case("hermes", "a tag later on is text", "I <think> so.", "I <think> so."),
    Case("qwen3_coder", "one call", f"Sure.\n{XML}", "Sure.", calls=[("weather", PARIS)]),
    Case("qwen3_coder", "no arguments", "<tool_call>\n<function=now>\n</function>\n</tool_call>", calls=[("now", {})]),
    Case(
        "qwen3_coder",
        "types of the schema",
        "<tool_call><function=weather><parameter=city>\n7\n</parameter><parameter=exact>True</parameter><parameter=units>null</parameter>"
        '<parameter=at>{"x": [1]}</parameter><parameter=days>soon</parameter><parameter=other>a\n b</parameter></function></tool_call>',
        calls=[("weather", {"city": "7", "exact": True, "units": None, "at": {"x": [1]}, "days": "soon", "other": "a\n b"})],
    ),
    Case("qwen3_coder", "not closed inside", "<tool_call><function=now><parameter=a>1</tool_call>", "<tool_call><function=now><parameter=a>1</tool_call>"),
    Case("glm", "one call", f"<think>Hm.</think>\nSure.\n{GLM}\n", "Sure.", "Hm.", [("weather", PARIS)]),
    Case("glm", "two calls", f"{GLM}\n<tool_call>now\n</tool_call>", calls=[("weather", PARIS), ("now", {})]),
    Case("glm", "malformed", "<tool_call>weather\n<arg_key>city</tool_call>", "<tool_call>weather\n<arg_key>city</tool_call>"),
    Case("llama_json", "one call", LLAMA, calls=[("weather", PARIS)]),
    Case("llama_json", "with the tag", f"<|python_tag|>{LLAMA}", calls=[("weather", PARIS)]),
    Case("llama_json", "two calls", f'{LLAMA}; {{"name": "now", "parameters": {{}}}}', calls=[("weather", PARIS), ("now", {})]),
    Case("llama_json", "with its type", '{"type": "function", "name": "now", "parameters": {}}', calls=[("now", {})]),
    Case("llama_json", "a JSON answer", '{"city": "Paris", "name": "now"}', '{"city": "Paris", "name": "now"}'),
    Case("llama_json", "an unknown tool", '{"name": "Bob", "parameters": {}}', '{"name": "Bob", "parameters": {}}'),
    Case("llama_json", "JSON after text", f"I call {LLAMA}", f"I call {LLAMA}"),
    Case("llama_json", "cut", LLAMA[:-3], LLAMA[:-3]),
    Case("llama_pythonic", "two calls", "[weather(city='Paris', days=3), now()]", calls=[("weather", PARIS), ("now", {})]),
    Case("llama_pythonic", "brackets in text", '[weather(city="]) \\"(", exact=true)]', calls=[("weather", {"city": ']) "(', "exact": True})]),
    Case("llama_pythonic", "a list", "[1, 2, 3]", "[1, 2, 3]"),
    Case("llama_pythonic", "a link", "[now](http://x)", "[now](http://x)"),
    Case("llama_pythonic", "an unknown tool", "[exit()]", "[exit()]"),
    Case("llama_pythonic", "code", "[weather(city=print(1))]", "[weather(city=print(1))]"),
    Case("mistral", "a list", '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Paris", "days": 3}}, {"name": "now", "arguments": {}}]', calls=[("weather", PARIS), ("now", {})]),
    Case("mistral", "names", 'Sure.[TOOL_CALLS]weather[ARGS]{"city": "Paris", "days": 3}[TOOL_CALLS]now[CALL_ID]aB3dE6gH9[ARGS]{}', "Sure.", calls=[("weather", PARIS), ("now", {})]),
    Case("mistral", "malformed", "[TOOL_CALLS] I do not know {", "[TOOL_CALLS] I do not know {"),
    Case("mistral", "cut", '[TOOL_CALLS]weather[ARGS]{"city"', '[TOOL_CALLS]weather[ARGS]{"city"'),
    Case("mistral", "thinking", "[THINK]Hm.[/THINK]It is 4.", "It is 4.", "Hm."),
    Case("deepseek", "V3", f"Sure.\n{V3}{V3_END}", "Sure.", calls=[("weather", PARIS)]),
    Case("deepseek", "V3.1, two calls", f"<｜tool▁calls▁begin｜>{V31}{V31}{V3_END}", calls=[("weather", PARIS), ("weather", PARIS)]),
    Case("deepseek", "R1", "Hm.\n</think>\n\nIt is 4.", "It is 4.", "Hm.", prompt="<｜Assistant｜><think>\n"),
    Case("deepseek", "malformed", f"<｜tool▁calls▁begin｜>now{V3_END}", f"<｜tool▁calls▁begin｜>now{V3_END}"),
    Case("harmony", "text", "<|channel|>final<|message|>It is 4.<|return|>", "It is 4.", prompt=HARMONY),
    Case(
        "harmony",
        "reasoning and text",
        "<|channel|>analysis<|message|>Hm. 4?<|end|><|start|>assistant<|channel|>final<|message|>It is 4.<|return|>",
        "It is 4.",
        "Hm. 4?",
        prompt=HARMONY,
    ),
    Case("harmony", "a call", f"<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant{HARMONY_CALL}", "", "Hm.", [("weather", PARIS)], HARMONY),
    Case("harmony", "recipient before the channel", " to=functions.now<|channel|>commentary <|constrain|>json<|message|>{}<|call|>", calls=[("now", {})], prompt=HARMONY),
    Case("harmony", "a preamble", f"<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{HARMONY_CALL}", "I look.", calls=[("weather", PARIS)], prompt=HARMONY),
    Case("harmony", "arguments that are not JSON", "<|channel|>commentary to=functions.now<|message|>{oh<|call|>", calls=[("now", None)], prompt=HARMONY),
    Case("harmony", "reasoning alone", "<|channel|>analysis<|message|>Hm <|en", "", "Hm <|en", prompt=HARMONY),
    Case("harmony", "no header", "It is <|channel|>4.", "It is <|channel|>4.", prompt=HARMONY),
    Case("harmony", "a message that the prompt began", "It is 4.<|return|>", "It is 4.", prompt=HARMONY + "<|channel|>final<|message|>"),
    Case("hermes", "required", '[{"name": "weather", "parameters": {"city": "Paris", "days": 3}}, {"name":"now","parameters":{}}]', calls=[("weather", PARIS), ("now", {})], required=True),
    Case("hermes", "required, cut", '[{"name": "now", "parameters": {}}, {"name"', ', {"name"', calls=[("now", {})], required=True),
]  # fmt: skip


def parser(case: Case) -> Parser:
    family = next(f for f in FAMILIES if f.name == case.family)
    template = " ".join((*family.template, family.thinking.opening))
    choice = ParserChoice(template)
    assert choice.family.name == case.family
    return choice.parser(SCHEMAS if case.tools else {}, case.prompt, required=case.required)


def parsed(case: Case, pieces: list[str]) -> tuple[str, str, list[Call]]:
    made = parser(case)
    deltas: list[Delta] = [*(made.feed(piece) for piece in pieces), made.finish()]
    calls = [call for delta in deltas for call in delta.calls]
    return "".join(d.content for d in deltas), "".join(d.reasoning for d in deltas), calls


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.family}: {case.name}")
def test_the_message_is_the_same_however_the_text_is_divided(case: Case) -> None:
    content, reasoning, calls = parsed(case, [case.text])
    assert (content, reasoning) == (case.content, case.reasoning)
    assert [call.name for call in calls] == [name for name, _ in case.calls]
    for call, (_, arguments) in zip(calls, case.calls, strict=True):
        assert call.arguments == "{oh" if arguments is None else json.loads(call.arguments) == arguments
    for at in range(len(case.text) + 1):
        assert parsed(case, [case.text[:at], case.text[at:]]) == (content, reasoning, calls), f"divided at {at}"
    assert parsed(case, list(case.text)) == (content, reasoning, calls), "in single characters"


def test_every_family_has_a_case() -> None:
    assert {family.name for family in FAMILIES} == {case.family for case in CASES} | {"plain"}


@pytest.mark.parametrize("case", [c for c in CASES if c.calls and c.family != "deepseek"], ids=lambda c: f"{c.family}: {c.name}")
def test_a_call_is_sent_before_the_completion_ends(case: Case) -> None:
    """Text streams at once; a call when its last character has arrived."""
    if case.name in ("no closing tag", "required, cut"):
        return
    made = parser(case)
    streamed = [call.name for character in case.text for call in made.feed(character).calls]
    assert streamed == [name for name, _ in case.calls]


def test_text_streams_by_the_word() -> None:
    made = ParserChoice("<tool_call><think>").parser(SCHEMAS, "")
    assert [made.feed(word).content for word in ("It", " is", " 4", ".\n", "<tool", "s>")] == [
        "It",
        " is",
        " 4",
        ".",
        "",
        "\n<tools>",
    ]
    thinks = ParserChoice("<think>").parser(SCHEMAS, "<think>\n")
    assert [thinks.feed(word).reasoning for word in ("Two", " and", " two", "</", "b>")] == ["Two", " and", " two", "", "</b>"]


def test_a_family_can_be_chosen_by_name() -> None:
    assert family_of("<tool_call>", "mistral").name == "mistral"
    assert family_of("").name == "plain"
    with pytest.raises(UnknownFamily, match="use one of harmony"):
        family_of("", "unheard")


def test_long_arguments_take_linear_time() -> None:
    made = ParserChoice("[TOOL_CALLS]").parser(SCHEMAS, "")
    text = '[TOOL_CALLS]weather[ARGS]{"city": "' + "a{" * 20_000 + '"}'
    calls = [call for at in range(0, len(text), 4) for call in made.feed(text[at : at + 4]).calls]
    assert len(calls) == 1 and len(calls[0].arguments) > 40_000
