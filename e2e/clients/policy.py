"""The weights and the tokenizer of the counting policy (see `counting`)."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from counting import MAX_LEN, RING, stride
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

END = 256
CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def head(embedding: Tensor, version: int) -> Tensor:
    """The output projection of a version: the most likely token is `stride` after the last one."""
    rows = 0.01 * embedding
    rows[:RING] = embedding[:RING].roll(stride(version), 0)
    return rows


def write(folder: Path) -> None:
    """Write version 0 with its tokenizer. Attention and MLP are random and small, so that logprobs
    depend on the whole prompt, but the most likely token does not."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=END + 1,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        tie_word_embeddings=False,
        max_position_embeddings=MAX_LEN,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=END,
        pad_token_id=END,
    )
    model = Qwen3ForCausalLM(config)
    model.eval()
    with torch.no_grad():
        embedding = torch.nn.functional.normalize(torch.randn(END + 1, config.hidden_size), dim=1)
        for token in range(RING, END + 1):  # any other token is close to one of the ring
            embedding[token] = embedding[token % RING] + 0.2 * embedding[token]
        for name, weight in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.mul_(0.05)
        weights = dict(model.named_parameters())
        weights["model.embed_tokens.weight"].copy_(embedding)
        weights["lm_head.weight"].copy_(head(embedding, 0))
    model.save_pretrained(folder)
    text = tokenizer()
    text.save_pretrained(folder)
    folder.with_name("loglikelihoods.json").write_text(json.dumps(loglikelihoods(model, text)))


@torch.no_grad()
def loglikelihoods(model: Qwen3ForCausalLM, text: PreTrainedTokenizerFast) -> list[dict[str, object]]:
    """Contexts with choices, and the loglikelihood of each choice after its context."""
    rows: list[dict[str, object]] = []
    for number in range(8):
        context, choices = f"Question {number}: count from {7 * number} on.", ["bcdefg", " one two three", "zzz"]
        found = []
        for choice in choices:
            ids = text(context + choice, return_tensors="pt")["input_ids"]
            logits = model.forward(ids).logits
            assert logits is not None
            logprobs = logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
            found.append(float(logprobs[-len(choice) :].sum()))
        rows.append({"context": context, "choices": choices, "loglikelihoods": found})
    return rows


def tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_ = Tokenizer(models.BPE({symbol: i for i, symbol in enumerate(alphabet)} | {"<end>": END}, []))
    bytes_.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bytes_.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=bytes_, eos_token="<end>", pad_token="<end>")
    made.chat_template = CHAT_TEMPLATE
    return made
