"""The token that stopped a turn is part of its path; the bridge does not write it again."""

from __future__ import annotations

import numpy as np
import pytest

from rollout_testing.sessiontest import HELLO, NEXT, Model, said, system, user
from rollout_testing.templates import model_of
from rollout_workers.data.prompts import PromptInvalid
from rollout_workers.sessions.segment import Sampled
from rollout_workers.sessions.session import Session
from rollout_workers.sessions.template import ChatTemplate


def next_prompt(model: Model, answer: str, stop: str) -> tuple[str, str]:
    """The tokens of the sampled turn and what follows them in the next prompt, as text."""
    session = model.session()
    ids = model.encode(answer + stop)
    turn = session.append(session.prompt(HELLO), Sampled(ids, np.zeros(len(ids), np.float32), message=said(answer)))[-1]
    prompt = session.prompt(NEXT)
    assert (
        prompt.parent == turn.segment_id
        and prompt.token_ids[: prompt.known].tolist() == session.token_ids(prompt.parent).tolist()
    )
    decode = model.text.tokenizer.decode
    return decode(prompt.token_ids[prompt.known - len(ids) : prompt.known]), decode(prompt.token_ids[prompt.known :])


@pytest.mark.parametrize(
    ("template", "stop", "following"),
    [
        ("glm", "<|user|>", "\nAnd 3+3?<|assistant|>\n"),  # the delimiter of the next message
        ("glm", "<|observation|>", "<|user|>\nAnd 3+3?<|assistant|>\n"),  # of another message than the next
        ("glm", "", "<|user|>\nAnd 3+3?<|assistant|>\n"),
        ("harmony", "<|return|>", "<|start|>user<|message|>And 3+3?<|end|><|start|>assistant<|message|>"),
        ("harmony", "<|end|>", "<|start|>user<|message|>And 3+3?<|end|><|start|>assistant<|message|>"),
        ("chatml", "<|endoftext|>", "\n<|im_start|>user\nAnd 3+3?<|im_end|>\n<|im_start|>assistant\n"),
        ("chatml", "<|im_end|>", "\n<|im_start|>user\nAnd 3+3?<|im_end|>\n<|im_start|>assistant\n"),
        ("chatml", "<|im_end|>\n", "<|im_start|>user\nAnd 3+3?<|im_end|>\n<|im_start|>assistant\n"),
        ("chatml", "", "<|im_end|>\n<|im_start|>user\nAnd 3+3?<|im_end|>\n<|im_start|>assistant\n"),
        (
            "llama3",
            "<|eot_id|>",
            "<|start_header_id|>user<|end_header_id|>\n\nAnd 3+3?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        ("plain", "\n\nuser:", "And 3+3?\n\nassistant:"),  # a stop string
    ],
)
def test_a_stop_token_is_not_repeated(template: str, stop: str, following: str) -> None:
    assert next_prompt(model_of(template), "It is 4.", stop) == ("It is 4." + stop, following)


def test_a_template_that_can_not_continue_renders_the_history_as_a_fork() -> None:
    """Its earlier turns are left out, so no text follows them."""
    model = model_of("chatml")
    model.text.tokenizer.chat_template = (
        "{% for message in messages if message.role != 'assistant' %}{{ message.content }}<|im_end|>{% endfor %}"
    )
    session = Session("ses-1", ChatTemplate(model.text))
    session.append(session.prompt(HELLO), model.turn("It is 4."))
    prompt = session.prompt(NEXT)
    assert prompt.fork and prompt.token_ids.tolist() == model.encode("What is 2+2?<|im_end|>And 3+3?<|im_end|>").tolist()


def test_a_history_that_the_template_refuses_is_a_typed_error() -> None:
    model = model_of("alternating")
    session = model.session()
    with pytest.raises(PromptInvalid, match="roles must alternate"):
        session.prompt([user("a"), user("b")])
    session.append(session.prompt(HELLO), model.turn("It is 4."))
    with pytest.raises(PromptInvalid, match="roles must alternate"):
        session.prompt([*HELLO, said("It is 4."), system("no"), user("b")])


def test_a_history_may_end_with_the_sampled_turn() -> None:
    """The assistant answers again, and later histories find both turns."""
    model = model_of("chatml")
    session = model.session()
    session.append(session.prompt(HELLO), model.turn("It is 4."))
    prompt = session.prompt([*HELLO, said("It is 4.")])
    second = session.append(prompt, model.turn("Really."))[-1]
    assert model.text.tokenizer.decode(prompt.token_ids).endswith("It is 4.<|im_end|>\n<|im_start|>assistant\n")
    later = session.prompt([*HELLO, said("It is 4."), said("Really."), user("Sure?")])
    assert later.parent == second.segment_id and not later.fork
