"""Incremental detokenization, which never emits half a character and always gives the same text as
``decode``."""

import codecs
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
REPLACEMENT = "�"

MAX_PENDING_TOKENS = 8
"""A character has at most 4 bytes. A replacement character that remains after this many tokens is
part of the text."""


_Utf8Decoder: type[codecs.BufferedIncrementalDecoder] = codecs.getincrementaldecoder(  # type: ignore[assignment]
    "utf-8"
)


class Vocabulary(Protocol):
    """The methods of a tokenizer that an incremental detokenizer needs."""

    def is_hidden(self, token_id: int) -> bool:
        """Return whether decoding skips the token because it is special or unknown."""
        ...

    def token(self, token_id: int) -> str: ...

    def token_bytes(self, token_id: int) -> bytes: ...

    def visible_bytes(self, token_id: int) -> bytes:
        """Return the token's bytes; empty for a hidden token."""
        ...

    def decode_visible(self, token_ids: Sequence[int]) -> str: ...


class IncrementalDetokenizer(Protocol):
    """Converts token ids to text incrementally. The pieces from :meth:`push` and the last one from
    :meth:`flush` together equal ``Tokenizer.decode`` of all ids. Amortised O(1) per token."""

    def push(self, token_ids: Iterable[int]) -> str: ...

    def flush(self) -> str: ...


class ByteLevelDetokenizer:
    """A detokenizer for byte-level BPE, where every token is a string of bytes.

    In an invalid byte sequence, each maximal invalid part becomes one replacement character. Python
    does this in the same way as Rust (the practice recommended in Unicode 15, section 3.9).

    Special tokens are skipped, except those in ``visible_special_ids``."""

    def __init__(
        self, vocabulary: Vocabulary, visible_special_ids: frozenset[int] = frozenset()
    ) -> None:
        self._vocabulary = vocabulary
        self._shown = visible_special_ids
        self._bytes_of = self._bytes_or_shown if visible_special_ids else vocabulary.visible_bytes
        self._decoder = _Utf8Decoder("replace")

    def push(self, token_ids: Iterable[int]) -> str:
        data = b"".join(map(self._bytes_of, token_ids))
        if not self._decoder.buffer and data.isascii():
            return data.decode("ascii")  # the most common case, and much faster
        return self._decoder.decode(data)

    def _bytes_or_shown(self, token_id: int) -> bytes:
        vocabulary, shown = self._vocabulary, token_id in self._shown
        return (vocabulary.token_bytes if shown else vocabulary.visible_bytes)(token_id)

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """A detokenizer for all tokenizers but byte-level BPE. A token's text is what the token adds to
    the text of the token before it.

    A run of byte tokens (``<0xE4>``) is held back until it ends, because an invalid byte turns the
    whole run into replacement characters. Special tokens are skipped, except those in
    ``visible_special_ids``: these appear as the vocabulary spells them, and the text after them is
    decoded without context.
    """

    def __init__(
        self, vocabulary: Vocabulary, visible_special_ids: frozenset[int] = frozenset()
    ) -> None:
        self._vocabulary = vocabulary
        self._shown = visible_special_ids
        self._context: list[int] = []
        self._pending: list[int] = []

    def push(self, token_ids: Iterable[int]) -> str:
        return "".join(self._push_one(token_id) for token_id in token_ids)

    def flush(self) -> str:
        if not self._pending:
            return ""
        text = self._decode_pending()
        self._pending.clear()
        return text

    def _push_one(self, token_id: int) -> str:
        if token_id in self._shown:
            text = self.flush() + self._vocabulary.token(token_id)
            self._context.clear()
            return text
        if self._vocabulary.is_hidden(token_id):
            return ""
        self._pending.append(token_id)
        if _BYTE_TOKEN.fullmatch(self._vocabulary.token(token_id)):
            return ""
        text = self._decode_pending()
        if text.endswith(REPLACEMENT) and len(self._pending) < MAX_PENDING_TOKENS:
            return ""
        self._context, self._pending = [token_id], []
        return text

    def _decode_pending(self) -> str:
        before = self._vocabulary.decode_visible(self._context)
        whole = self._vocabulary.decode_visible(self._context + self._pending)
        return whole[len(before) :]


def byte_level_alphabet() -> dict[str, int]:
    """Return a map from the characters with which byte-level BPE writes bytes to these bytes.
    Printable bytes are written as themselves; the others, in order, as the code points from 256 on
    (GPT-2's ``bytes_to_unicode``)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + index): byte for index, byte in enumerate(others)
    }


def byte_level_bytes(alphabet: dict[str, int]) -> Callable[[str], bytes]:
    """Return a function from a token to its bytes. A token with characters outside of the alphabet
    is encoded as plain UTF-8 text."""

    def to_bytes(token: str) -> bytes:
        try:
            return bytes(map(alphabet.__getitem__, token))
        except KeyError:
            return token.encode()

    return to_bytes
