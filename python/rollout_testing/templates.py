"""Chat templates in the style of common model families, over a byte-level BPE that is trained
here."""

from __future__ import annotations

import json
from collections.abc import Sequence

from rollout_testing.sessiontest import Model, chat_model
from rollout_workers.data.prompts import Text

SPECIAL = [
    "<|im_start|>",
    "<|im_end|>",
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|user|>",
    "<|assistant|>",
    "<|observation|>",
    "<|system|>",
    "<|start|>",
    "<|message|>",
    "<|end|>",
    "<|return|>",
    "<|endoftext|>",
]
ADDED = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]

_TOOLS = """{%- if tools %}{{ '<|im_start|>system
' }}{% if messages[0].role == 'system' %}{{ messages[0].content + '

' }}{% endif %}# Tools
<tools>{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
</tools>{{ '<|im_end|>
' }}{% elif messages[0].role == 'system' %}{{ '<|im_start|>system
' + messages[0].content + '<|im_end|>
' }}{% endif %}"""

_CALLS = """{% if message.tool_calls %}{% for call in message.tool_calls %}
{%- if (loop.first and content) or not loop.first %}{{ '
' }}{% endif %}{{ '<tool_call>
{"name": "' + call.function.name + '", "arguments": ' }}{{ call.function.arguments | tojson }}{{ '}
</tool_call>' }}{% endfor %}{% endif %}"""

_RESULTS = """{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}{{ '
<tool_response>
' + message.content + '
</tool_response>' }}{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>
' }}{% endif %}"""

TEMPLATES = {
    "chatml": (
        "{% for message in messages %}{% if loop.first and message.role != 'system' %}"
        "{{ '<|im_start|>system\nYou are helpful.<|im_end|>\n' }}{% endif %}"
        "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "hermes": _TOOLS
    + "{% for message in messages %}{% set content = message.content or '' %}"
    + "{% if message.role == 'tool' %}"
    + _RESULTS
    + "{% elif message.role == 'assistant' %}{{ '<|im_start|>assistant\n' + content }}"
    + _CALLS
    + "{{ '<|im_end|>\n' }}"
    + "{% elif not (message.role == 'system' and loop.first) %}"
    + "{{ '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    + "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    # Thinking stays after the last question alone, and turns there without any get an empty one.
    "qwen3": _TOOLS
    + "{% set ns = namespace(last=-1) %}{% for message in messages %}"
    + "{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    + "{% for message in messages %}{% set content = message.content or '' %}"
    + "{% if message.role == 'tool' %}"
    + _RESULTS
    + "{% elif message.role == 'assistant' %}{% set thought = message.reasoning_content or '' %}"
    + "{% if '</think>' in content %}{% set thought = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    + "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    + "{{ '<|im_start|>assistant\n' }}{% if loop.index0 > ns.last and (loop.last or thought) %}"
    + "{{ '<think>\n' + thought + '\n</think>\n\n' }}{% endif %}{{ content }}"
    + _CALLS
    + "{{ '<|im_end|>\n' }}"
    + "{% elif not (message.role == 'system' and loop.first) %}"
    + "{{ '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    + "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    # One call per turn; no separator after the end of a turn.
    "llama3": (
        "{{ '<|begin_of_text|>' }}{% if tools %}{{ '<|start_header_id|>system<|end_header_id|>\n\n' }}"
        "{% if messages[0].role == 'system' %}{{ messages[0].content | trim }}{% endif %}"
        "{% for tool in tools %}{{ tool | tojson }}{% endfor %}{{ '<|eot_id|>' }}{% endif %}"
        "{% for message in messages %}{% if not (tools and loop.first and message.role == 'system') %}"
        "{% set role = 'ipython' if message.role == 'tool' else message.role %}"
        "{{ '<|start_header_id|>' + role + '<|end_header_id|>\n\n' }}"
        "{% if message.tool_calls %}"
        "{% if message.tool_calls | length > 1 %}{{ raise_exception('one call at a time') }}{% endif %}"
        "{% set call = message.tool_calls[0].function %}"
        "{{ '{\"name\": \"' + call.name + '\", \"parameters\": ' }}{{ call.arguments | tojson }}{{ '}' }}"
        "{% elif message.role == 'tool' %}{{ message.content | tojson }}{% else %}{{ message.content | trim }}{% endif %}"
        "{{ '<|eot_id|>' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
    ),
    # No token ends a turn: the model writes the delimiter of the next message.
    "glm": (
        "{{ '<|system|>\n' }}{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
        "{% for message in messages %}"
        "{% if message.role == 'assistant' %}{{ '<|assistant|>\n' + message.content }}"
        "{% elif message.role == 'tool' %}{{ '<|observation|>\n' + message.content }}"
        "{% else %}{{ '<|' + message.role + '|>\n' + message.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
    ),
    # Sampled turns end with another token than the earlier turns of a history.
    "harmony": (
        "{% for tool in tools or [] %}{{ '<|start|>developer<|message|>' }}{{ tool | tojson }}{{ '<|end|>' }}{% endfor %}"
        "{% for message in messages %}{{ '<|start|>' + message.role + '<|message|>' + message.content }}"
        "{{ '<|return|>' if message.role == 'assistant' and loop.last and not add_generation_prompt else '<|end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start|>assistant<|message|>' }}{% endif %}"
    ),
    # Nothing but text.
    "plain": (
        "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
        "{% for message in messages %}{{ message.role + ':' + message.content + '\n\n' }}{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    ),
    # Refuses roles that do not alternate, and has no system role.
    "alternating": (
        "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
        "{% for message in messages %}{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}"
        "{{ '<|start|>' + message.role + '\n' + message.content | trim + '<|end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
    ),
}
CORPUS = [
    "What is 2+2? It is 4. And 3+3? It is 6. Answer the question.",
    "You are helpful. You plan. You search. system user assistant tool",
    '{"name": "search", "arguments": {"query": "sums", "most": 3}} parameters function type object string integer',
] * 8


def text_of(template: str) -> Text:
    """A tokenizer with a template and added tokens of all families."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken(token, special=False) for token in ADDED])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>")
    fast.chat_template = TEMPLATES[template]
    return Text(fast)


def hermes_calls(calls: Sequence[tuple[str, str]]) -> str:
    """Calls as Hermes and Qwen write them, with arguments as the client gets them."""
    return "\n".join(
        "<tool_call>\n" + json.dumps({"name": name, "arguments": json.loads(arguments)}) + "\n</tool_call>"
        for name, arguments in calls
    )


def llama_call(calls: Sequence[tuple[str, str]]) -> str:
    """A call as Llama 3 writes it."""
    [(name, arguments)] = calls
    return json.dumps({"name": name, "parameters": json.loads(arguments)})


def model_of(template: str) -> Model:
    """The model of a template."""
    text = text_of(template)
    match template:
        case "hermes":
            return chat_model(text, "<|im_end|>", tools=8, call=hermes_calls)
        case "qwen3":
            return chat_model(text, "<|im_end|>", tools=8, call=hermes_calls, thinks=True)
        case "llama3":
            return chat_model(text, "<|eot_id|>", tools=1, call=llama_call)
        case "glm" | "plain":
            return chat_model(text, "")
        case "harmony":
            return chat_model(text, "<|end|>")
        case "alternating":
            return chat_model(text, "<|end|>", system=False)
        case _:
            return chat_model(text, "<|im_end|>")
