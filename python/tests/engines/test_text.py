"""Stop strings across token borders, and streams whose pieces add up to the text."""

from dataclasses import replace

import pytest
from tokenizers.pre_tokenizers import ByteLevel

from rollout_workers.engines.base import SampleDelta, SampleOutput
from rollout_workers.engines.errors import TokenizerMissing
from rollout_workers.engines.transformers.text import SampleText, advance

from .tiny import byte_tokenizer, outputs, request, running, same_bits

TOKENIZER = byte_tokenizer()


def decode(ids) -> str:
    return TOKENIZER.batch_decode([ids], skip_special_tokens=True, clean_up_tokenization_spaces=False)[0]


def feed(content: str | bytes, stop: tuple[str, ...] = ()) -> tuple[list[str], SampleText]:
    """The new settled text after each byte of the content."""
    text, pieces = SampleText(stop), []
    alphabet = sorted(ByteLevel.alphabet())
    symbols = {byte: alphabet.index(symbol) for byte, symbol in _bytes_to_symbols().items()}
    for byte in content.encode() if isinstance(content, str) else content:
        text.push(symbols[byte])
        advance([text], TOKENIZER)
        pieces.append(text.settled_text())
        if text.matched:
            break
    return pieces, text


def _bytes_to_symbols() -> dict[int, str]:
    """The byte alphabet of GPT-2."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in plain]
    return {b: chr(b) for b in plain} | {b: chr(256 + i) for i, b in enumerate(others)}


def test_a_character_is_returned_whole() -> None:
    pieces, text = feed("aé€𝄞!")
    assert pieces == ["a", "", "é", "", "", "€", "", "", "", "𝄞", "!"]
    assert text.text == "aé€𝄞!"


def test_invalid_bytes_are_returned_once_they_cannot_become_a_character() -> None:
    _, text = feed(b"a\xff\xfe\xe2\x82b")
    advance([text], TOKENIZER, final=True)
    assert text.text == b"a\xff\xfe\xe2\x82b".decode(errors="replace")


def test_an_incomplete_character_is_returned_at_the_end() -> None:
    pieces, text = feed(b"ab\xe2\x82")
    assert "".join(pieces) == "ab"
    advance([text], TOKENIZER, final=True)
    assert text.remaining_text() == "\ufffd" and text.text == "ab\ufffd"


def test_a_stop_string_is_found_across_tokens_and_never_shown() -> None:
    pieces, text = feed("one. <stoop>Two</stop>three", stop=("</stop>", "<stop>"))
    assert text.matched == "</stop>" and text.text == "one. <stoop>Two"
    assert "".join(pieces) + text.remaining_text() == text.text
    shown = ""
    for piece in pieces:
        shown += piece
        assert text.text.startswith(shown)


def test_the_earliest_of_several_stop_strings_wins() -> None:
    _, text = feed("xxab", stop=("b", "ab"))
    assert (text.text, text.matched) == ("xx", "ab")


async def test_engine_stops_at_a_string_across_tokens_and_streams_add_up() -> None:
    async with running(text=True, max_len=128) as engine:
        free = (await outputs(engine, request("a", max_tokens=100, stream=True)))["a", 0]
        assert free.text is not None
        at = next(i for i in range(20, 90) if free.text[i : i + 3].isascii() and free.text.index(free.text[i : i + 3]) == i)
        stop = free.text[at : at + 3]
        items = [i async for i in engine.generate([request("a", max_tokens=100, stream=True, stop=(stop, "never"))])]
        silent = (await outputs(engine, request("a", max_tokens=100, stop=(stop,))))["a", 0]
    deltas, out = [d for d in items if isinstance(d, SampleDelta)], items[-1]
    assert isinstance(out, SampleOutput) and len(deltas) == len(items) - 1
    assert out.text is not None and out.finish_reason == "stop" and out.stop_string == stop and out.text == free.text[:at]
    assert "".join(d.text for d in deltas) == out.text
    assert [t for d in deltas for t in d.token_ids] == out.token_ids.tolist() == free.token_ids[: len(out.token_ids)].tolist()
    assert [x for d in deltas for x in d.logprobs] == out.logprobs.tolist()
    assert all(d.start == i for i, d in enumerate(deltas) if len(d.token_ids))
    assert {d.version for d in deltas} == {s.version for s in out.version_spans}
    assert decode(out.token_ids).startswith(out.text + stop)
    assert silent.text == out.text and silent.token_ids.tolist() == out.token_ids.tolist()


def test_a_stop_string_may_not_end_a_sample_before_min_tokens() -> None:
    text = SampleText(("ab", "b"), min_tokens=3)
    for symbol in "xabab":
        text.push(sorted(ByteLevel.alphabet()).index(symbol))
        advance([text], TOKENIZER)
    assert (text.text, text.matched) == ("xab", "ab")


@pytest.mark.parametrize("stops", [False, True])
async def test_a_continued_stream_equals_the_rest_of_the_whole_one(stops: bool) -> None:
    async with running(text=True, max_len=128) as engine:
        free = (await outputs(engine, request("a", max_tokens=100, stream=True)))["a", 0]
        assert free.text is not None
        stop = (free.text[60:66],) if stops else ()
        asked = request("a", max_tokens=100, stream=True, stop=stop, top_logprobs=2)
        deltas = [i async for i in engine.generate([asked]) if isinstance(i, SampleDelta)]
        whole = (await outputs(engine, asked))["a", 0]
        ids = whole.token_ids.tolist()
        assert not stops or whole.stop_string == stop[0]
        for count in range(1, len(ids), 13):
            items = [i async for i in engine.generate([replace(asked, continued=ids[:count])])]
            rest, out = [i for i in items if isinstance(i, SampleDelta)], items[-1]
            assert isinstance(out, SampleOutput) and whole.top_logprobs is not None and out.top_logprobs is not None
            assert out.token_ids.tolist() == ids[count:] and out.stop_string == whole.stop_string
            assert out.text == "".join(d.text for d in deltas[count:]) == "".join(d.text for d in rest)
            assert out.top_logprobs.token_ids.tolist() == whole.top_logprobs.token_ids[count:].tolist()
            assert [d.start for d in rest if len(d.token_ids)] == list(range(len(ids) - count))
            assert all((d.top_logprobs is not None) and len(d.top_logprobs.token_ids) == len(d.token_ids) for d in rest)
        done = (await outputs(engine, replace(asked, continued=ids)))["a", 0]
    assert (done.finish_reason, done.stop_string, done.text, len(done.token_ids)) == (
        whole.finish_reason,
        whole.stop_string,
        "",
        0,
    )


async def test_streams_of_many_samples_add_up_to_the_decoded_ids() -> None:
    async with running(text=True, slots=3) as engine:
        texts: dict[int, str] = {}
        finals = {}
        async for item in engine.generate([request("a", seeds=range(9), max_tokens=30, stream=True)]):
            if isinstance(item, SampleDelta):
                texts[item.sample] = texts.get(item.sample, "") + item.text
            else:
                finals[item.sample] = item
    assert len(finals) == 9
    for sample, out in finals.items():
        assert texts[sample] == out.text == decode(out.token_ids)


async def test_an_end_token_leaves_no_text() -> None:
    async with running(text=True) as engine:
        free = (await outputs(engine, request("a", max_tokens=10, stream=True)))["a", 0]
        last = int(free.token_ids[4])
        out = (await outputs(engine, request("a", max_tokens=10, stream=True, stop_token_ids=(last,))))["a", 0]
    cut = free.token_ids.tolist().index(last)
    assert out.finish_reason == "stop" and out.text == decode(free.token_ids[:cut])


async def test_text_without_a_tokenizer_is_an_error() -> None:
    async with running() as engine:
        for wrong in (request("a", stream=True), request("b", stop=("x",))):
            with pytest.raises(TokenizerMissing, match=wrong.request_id):
                await outputs(engine, wrong)


@pytest.mark.parametrize("first", [True, False], ids=["streamed first", "streamed last"])
async def test_a_streamed_group_runs_next_to_others_with_the_same_parameters(first: bool) -> None:
    async with running(text=True, max_len=64, slots=8, deterministic=True) as engine:
        batch = [
            request("a", seeds=range(2), max_tokens=20, stream=first),
            request("b", seeds=range(2), max_tokens=20, stream=not first),
        ]
        streamed = "a" if first else "b"
        alone = await outputs(engine, batch[not first])
        shown: dict[int, str] = {0: "", 1: ""}
        ends: dict[tuple[str, int], SampleOutput] = {}
        async for item in engine.generate(batch):
            if isinstance(item, SampleDelta):
                assert item.request_id == streamed
                shown[item.sample] += item.text
            else:
                ends[item.request_id, item.sample] = item
        assert not any(end.error for end in ends.values()) and len(ends) == 4
        for (name, sample), end in ends.items():
            assert len(end.token_ids) == 20
            assert end.text == (shown[sample] if name == streamed else None)
            if name == streamed:
                assert end.text and end.text == alone[name, sample].text and same_bits(end, alone[name, sample])
