"""The bytes of single tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"  # SentencePiece writes a space as this character


class TokenBytes:
    """The UTF-8 bytes of the tokens of a Hugging Face tokenizer: byte-level BPE, SentencePiece, and
    others by the text of the single token."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known = {at: token.content.encode() for at, token in tokenizer.added_tokens_decoder.items()}
        self._convert = _conversion(tokenizer)

    def of(self, ids: NDArray[np.int32]) -> list[bytes]:
        """The bytes of each id; none for an id that the tokenizer does not have."""
        found: list[bytes] = []
        for at in ids.tolist():
            if (data := self._known.get(at)) is None:
                data = self._known[at] = self._convert(at)
            found.append(data)
        return found


def _conversion(tokenizer: Any) -> Callable[[int], bytes]:
    kinds = _decoders(tokenizer)

    def by_name(at: int) -> bytes:
        token = tokenizer.convert_ids_to_tokens(at)
        if isinstance(token, bytes | None):
            return token or b""
        if "ByteLevel" in kinds:
            return bytes(_BYTES[c] for c in token) if all(c in _BYTES for c in token) else token.encode()
        if match := _BYTE.fullmatch(token):
            return bytes([int(match.group(1), 16)])
        return token.replace(_SPACE, " ").encode()

    def by_text(at: int) -> bytes:
        return tokenizer.decode([at], skip_special_tokens=False, clean_up_tokenization_spaces=False).encode()

    pieces = not kinds.isdisjoint(("ByteLevel", "Metaspace", "ByteFallback"))
    return by_name if pieces or getattr(tokenizer, "backend_tokenizer", None) is None else by_text


def _decoders(tokenizer: Any) -> set[str]:
    """The types of the decoder of a tokenizer.json."""
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    if decoder is None:
        return set()
    found, stack = set[str](), [json.loads(decoder.__getstate__())]
    while stack:
        each = stack.pop()
        found.add(each["type"])
        stack.extend(each.get("decoders", ()))
    return found


def _alphabet() -> dict[str, int]:
    """Character of a byte-level vocabulary -> byte, as in GPT-2: printable characters stand for
    themselves, the other bytes for characters from U+0100."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}


_BYTES = _alphabet()
