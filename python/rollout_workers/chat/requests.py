"""The chat of a request: messages and tools in the form of OpenAI's API, which chat templates
read, and the constraint of a required call."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from rollout.inference.v1 import inference_pb2 as pb
from rollout_workers.chat.calls import Call, Schemas
from rollout_workers.engines.base import Constraint
from rollout_workers.sessions.messages import Message
from rollout_workers.sessions.template import Options, Tools
from rollout_workers.worker.status import InvalidRequest

_RESERVED = frozenset((
    "conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt", "continue_final_message",
    "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask",
    "tokenizer_kwargs", "processor_kwargs",
))  # fmt: skip
"""Arguments of ``apply_chat_template``, which are not variables."""


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """One chat. tools: that the template renders. schemas: of the arguments of the tools that the
    completion may call. required: whether it must. parallel: whether it may make several calls."""

    messages: list[Message]
    tools: Tools
    schemas: Schemas
    options: Options
    required: bool
    parallel: bool

    @property
    def characters(self) -> int:
        """Size of the messages and tools, about."""
        return len(str(self.messages)) + len(str(self.tools))

    def constraint(self) -> Constraint:
        """Of a completion that must call a tool: a JSON list of calls."""
        calls = [
            {
                "type": "object",
                "properties": {"name": {"const": name}, "parameters": schema or {"type": "object"}},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
            for name, schema in self.schemas.items()
        ]
        schema = {"type": "array", "items": {"anyOf": calls}, "minItems": 1, **({} if self.parallel else {"maxItems": 1})}
        return Constraint("json_schema", json.dumps(schema))


def chat_of(chat: pb.Chat, path: str) -> ChatRequest:
    """The chat of a request. path: of its field. Raises ``InvalidRequest``."""
    problems: list[tuple[str, str]] = []
    schemas: dict[str, Mapping[str, Any]] = {}
    tools: list[Mapping[str, Any]] = []
    for at, tool in enumerate(chat.tools):
        schema = _object(tool.parameters, f"{path}.tools[{at}].parameters", problems)
        if tool.name in schemas:
            problems.append((f"{path}.tools[{at}].name", f"{tool.name!r} is the name of another tool too"))
        schemas[tool.name] = schema
        described = {"description": tool.description} if tool.description else {}
        parameters = schema or {"type": "object", "properties": {}}
        tools.append({"type": "function", "function": {"name": tool.name, **described, "parameters": parameters}})
    variables = _object(chat.template_variables, f"{path}.template_variables", problems)
    for name in sorted(_RESERVED.intersection(variables)):
        problems.append((f"{path}.template_variables", f"has {name!r}, which is not a variable of the template"))
    choice = chat.tool_choice
    required = choice.mode == pb.ToolChoice.MODE_REQUIRED
    if required and not tools:
        problems.append((f"{path}.tool_choice", "requires a call, but the chat has no tools"))
    if choice.name and not required:
        problems.append((f"{path}.tool_choice.name", "is set without MODE_REQUIRED"))
    elif choice.name and choice.name not in schemas:
        problems.append((f"{path}.tool_choice.name", f"is {choice.name!r}, of tools {', '.join(schemas)}"))
    last = chat.messages[-1]
    if chat.continue_final_message and (last.role != "assistant" or last.tool_calls or not (last.content or last.reasoning)):
        problems.append((f"{path}.continue_final_message", "needs a last message of the assistant with text and without calls"))
    if chat.continue_final_message and required:
        problems.append((f"{path}.continue_final_message", "can't be combined with a required call"))
    if problems:
        raise InvalidRequest("; ".join(f"{where} {problem}" for where, problem in problems), violations=problems)
    if choice.mode == pb.ToolChoice.MODE_NONE:
        tools, schemas = [], {}
    elif choice.name:
        schemas = {choice.name: schemas[choice.name]}
    parallel = not chat.HasField("parallel_tool_calls") or chat.parallel_tool_calls
    options = Options(variables, chat.continue_final_message)
    return ChatRequest([_message(m) for m in chat.messages], tools, schemas, options, required, parallel)


def call_id(request: str, prompt: int, sample: int, index: int, length: int = 0) -> str:
    """The id of a call, the same for the same request. length: of letters and digits, if the
    template requires one."""
    digest = blake2b(f"{request}/{prompt}/{sample}/{index}".encode(), digest_size=12).hexdigest()
    return digest[:length] if length else f"call_{digest}"


def tool_call(name: str, arguments: str, call_id: str) -> dict[str, Any]:
    """A call in the form of OpenAI's API."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def assistant(content: str, reasoning: str, calls: list[tuple[str, Call]]) -> Message:
    """The message of the assistant. calls: with their ids."""
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [tool_call(call.name, call.arguments, name) for name, call in calls]
    return message


def _message(message: pb.ChatMessage) -> Message:
    out: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning:
        out["reasoning_content"] = message.reasoning
    if message.tool_calls:
        out["tool_calls"] = [tool_call(call.name, call.arguments, call.id) for call in message.tool_calls]
    if message.tool_call_id:
        out["tool_call_id"] = message.tool_call_id
    if message.name:
        out["name"] = message.name
    return out


def _object(text: str, path: str, problems: list[tuple[str, str]]) -> dict[str, Any]:
    """The JSON object of a field; empty for an empty text."""
    if not text:
        return {}
    try:
        value = json.loads(text)
    except ValueError as error:
        problems.append((path, f"is not JSON: {error}"))
        return {}
    if not isinstance(value, dict):
        problems.append((path, "is not a JSON object"))
        return {}
    return value
