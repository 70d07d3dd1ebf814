"""The text of tokens for a parser, of tokenizers that begin a text with a space."""

from __future__ import annotations

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rollout_testing.templates import text_of
from rollout_workers.chat.decode import MarkedText
from rollout_workers.data.prompts import Text


def sentencepiece() -> Text:
    tokenizer = Tokenizer(models.BPE({token: at for at, token in enumerate(["<unk>", "▁", "a", "b"])}, [], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens([AddedToken("[CALLS]", special=True), AddedToken("</s>", special=True)])
    return Text(PreTrainedTokenizerFast(tokenizer_object=tokenizer))


@pytest.mark.parametrize("made", [sentencepiece, lambda: text_of("chatml")])
def test_the_text_is_that_of_the_engine(made: object) -> None:
    text = made()  # type: ignore[operator]
    [ids] = text.encode(["a b"], special=False)
    marked = MarkedText(text, (), ())
    assert "".join(marked.push(ids[at : at + 1]) for at in range(len(ids))) + marked.finish(stopped=True) == "a b"


def test_markers_stay_and_other_special_tokens_do_not() -> None:
    text = sentencepiece()
    ids = text.tokenizer.convert_tokens_to_ids(["a", "[CALLS]", "b", "</s>"])
    assert MarkedText(text, ("[CALLS]",), ()).push(np.array(ids, np.int32)) == "a[CALLS]b"
