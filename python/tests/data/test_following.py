"""A completion is tokenized as a continuation of its prompt, also by tokenizers that add a space
before a text."""

from __future__ import annotations

import json

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from rollout_workers.data.preference import Labelled, Pairs
from rollout_workers.data.prompts import PromptReader, Text
from rollout_workers.data.supervised import Example, Limit, Supervised

SPACE = "\u2581"
SPACED = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[{{ m.content }}]{% else %} {{ m.content }}</s>{% endif %}"
)
SPACED += "{% endfor %}"
MARKED = "{{ bos_token }}{% for m in messages %}{{ '<|user|>' if m.role == 'user' else '<|ai|>' }}{{ m.content }}</s>{% endfor %}"
MARKED += "{% if add_generation_prompt %}<|ai|>{% endif %}"
TALK = [{"role": "user", "content": "Yo"}, {"role": "assistant", "content": "Hi"}] * 2


def text_of(kind: str, template: str = SPACED) -> Text:
    """A tokenizer of SentencePiece's kind: of Llama 2 ("legacy"), where each stretch between
    special tokens begins with a space, or where the whole text alone does ("first")."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), SPACE, *map(chr, range(33, 127))]
    merges = [(SPACE, SPACE), (SPACE, "H"), (SPACE, "4"), ("4", "2"), (SPACE, "42")]
    vocabulary = {name: i for i, name in enumerate([*names, *(a + b for a, b in merges)])}
    fast = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    if kind == "legacy":
        fast.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    else:
        fast.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme="first", split=False)
    fast.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    fast.add_special_tokens([AddedToken(name, normalized=False) for name in ("<s>", "</s>", "<|user|>", "<|ai|>")])
    fast.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=fast, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    tokenizer.chat_template = template
    return Text(tokenizer)


@pytest.mark.parametrize("template", [SPACED, MARKED])
@pytest.mark.parametrize("kind", ["legacy", "first"])
def test_a_conversation_has_the_tokens_of_its_whole_text(kind: str, template: str) -> None:
    text = text_of(kind, template)
    reader = PromptReader(text, prompt_field="messages", chat_template=True)
    rows = Supervised(text, reader, answer_field="answer", train_on_prompt=False, limit=Limit(200))
    [made] = rows.examples([json.dumps({"messages": TALK}).encode()])
    assert isinstance(made, Example)
    [wanted] = text.encode([text.render(TALK, answering=False)], special=False)
    assert made.token_ids.tolist() == wanted.tolist()
    [answered] = rows.examples([json.dumps({"messages": TALK[:1], "answer": "Hi"}).encode()])
    assert isinstance(answered, Example)
    if template == MARKED:
        [wanted] = text.encode([text.render(TALK[:2], answering=False)], special=False)
        assert answered.token_ids.tolist() == wanted.tolist()


@pytest.mark.parametrize("kind", ["legacy", "first"])
def test_completions_do_not_begin_with_a_space_of_their_own(kind: str) -> None:
    text = text_of(kind)
    prompts = PromptReader(text, prompt_field="prompt", chat_template=False)
    row = json.dumps({"prompt": "17+25=", "answer": "42", "chosen": "42", "rejected": "4", "label": True}).encode()
    wanted = [[*text.encode([f"17+25={answer}"])[0].tolist(), 2] for answer in ("42", "4")]
    pairs = Pairs(text, prompts, chosen_field="chosen", rejected_field="rejected", margin_field="", limit=Limit(99))
    labelled = Labelled(text, prompts, completion_field="answer", label_field="label", limit=Limit(99))
    supervised = Supervised(text, prompts, answer_field="answer", train_on_prompt=False, limit=Limit(99))
    [pair], [single], [example] = pairs.examples([row]), labelled.examples([row]), supervised.examples([row])
    assert isinstance(pair, list) and isinstance(single, list) and isinstance(example, Example)
    assert [made.token_ids.tolist() for made in (*pair, *single, example)] == [*wanted, wanted[0], wanted[0]]
