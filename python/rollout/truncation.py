"""Shortens prompts that leave too little room in the context (``data.overlong = "truncate"``).

The planner and the workers use this code, so that a prompt that fits in the plan fits in the run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rollout.dataset import Message, Prompt

_ATTEMPTS = 8
"""Cuts of a text: a text that begins in the middle of a word may have more tokens than its part."""


def shorten_chat(
    prompt: Prompt, longest: int, length: Callable[[Sequence[Message]], int], encode: Callable[[str], Any]
) -> list[Message] | None:
    """The end of a chat prompt, in at most ``longest`` tokens; None if the template alone has more.

    First the oldest turns are left out: messages up to the next one of the user, except those of
    the system at the beginning. If one turn is left, the beginning of its last message is cut.

    length: tokens of messages as the chat template writes them. encode: a text to an encoding of
    the library ``tokenizers``.
    """
    messages: list[Message] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    systems = next((n for n, message in enumerate(messages) if message.get("role") != "system"), len(messages))
    head, rest = messages[:systems], messages[systems:]
    while (over := length(head + rest) - longest) > 0:
        following = next((n for n, message in enumerate(rest) if n and message.get("role") == "user"), None)
        if following is None:
            break
        rest = rest[following:]
    if over <= 0:
        return head + rest
    if not rest:
        return None
    *before, last = rest
    content, cut = last["content"], 0
    for _ in range(_ATTEMPTS):
        cut += over
        text = cut_start(encode(content), content, cut)
        shorter = [*head, *before, {**last, "content": text}]
        if (over := length(shorter) - longest) <= 0:
            return shorter if text else None
        if not text:
            return None
    return None


def cut_start(encoding: Any, text: str, tokens: int) -> str:
    """A text without its first tokens. encoding: that of the text."""
    if tokens >= len(encoding.offsets):
        return ""
    return text[encoding.offsets[tokens][0] :]
