"""An encoder some twenty times as fast as ``tokenizers``, used for models for which it gives the
same ids.

``fastokens`` reads the same ``tokenizer.json``, but does not support every kind of tokenizer. It is
used for a model only if it gives the same ids as ``tokenizers``, the reference, for texts on which
tokenizers are known to differ, with and without the special tokens that begin and end a text.

``fastokens`` never frees the working memory that its longest word needed: 45 bytes per character,
370 MB for 8 MB of spaces. So a text that may have a word of more than 2 * WINDOW_CHARACTERS is left
to the reference.
"""

import re

import structlog
import tokenizers
from fastokens import Tokenizer as FastTokenizer

log = structlog.get_logger(__name__)

SAMPLES = (
    "",
    " ",
    "Hello, world!",
    "  two  spaces ,  then\ttabs\t\tand\n\n\nlines\r\n \n",
    "It's we'll THEY'RE 'quoted' don't I'M",
    "1 12 123 1234 12345 3.14159 1,000,000 0x7f ½ ² ٣٤٥",
    "def f(self, *args):\n    return {k: v for k, v in args.items()}\n",
    "naïve café coöperate Straße İstanbul ǅ ﬁ Å Å é é",
    "漢字かな交じり文、한국어 텍스트 ไทย देवनागरी ខ្មែរ",
    "العربية עברית \u202eright to left\u202c",
    "👩‍👩‍👧‍👦 🇩🇪 👍🏽 \U0001f9d1\u200d\U0001f680 \ufe0f \u200b\u200d\ufeff",
    "\x00\x01\x1f\x7f\x85\xa0\u2028\u2029\u3000",
    "<0x0A> ▁ Ġ Ċ </s> <s> <unk> <|x|> [INST]",
    "a" * 200 + "!" * 70 + " " * 70 + "\n" * 70,
)


WINDOW_CHARACTERS = 2048
"""A text is encoded by ``fastokens`` only if a word certainly ends in each window of this size."""

WORD_ENDS = ' \n\t,.;:!?()[]{}"、。，；：！？（）「」'
"""Most tokenizers end a word between a letter or digit and any of these."""


class FastEncoder:
    """Wraps ``fastokens``. Thread-safe. ``word_end`` matches places where a word certainly ends; it
    is None when there is no such pattern."""

    def __init__(self, tokenizer: FastTokenizer, word_end: re.Pattern[str] | None) -> None:
        self._tokenizer = tokenizer
        self._word_end = word_end

    def encode(self, text: str, add_special_tokens: bool) -> list[int] | None:
        """Encode a text. Return None if it may have a very long word, or if ``fastokens`` fails on
        it."""
        if self._may_have_long_word(text):
            return None
        try:
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        # The library raises bare errors.
        except Exception as error:
            log.warning("fast_tokenizer_failed", error=str(error), characters=len(text))
            return None
        return ids

    def _may_have_long_word(self, text: str) -> bool:
        last = len(text) - WINDOW_CHARACTERS
        if self._word_end is None:
            return last > WINDOW_CHARACTERS
        ends = self._word_end.search
        return not all(
            ends(text, start, start + WINDOW_CHARACTERS)
            for start in range(0, last, WINDOW_CHARACTERS)
        )


def make_fast_encoder(reference: tokenizers.Tokenizer) -> FastEncoder | None:
    """Return a fast encoder; None if ``fastokens`` can't read the tokenizer, or gives different
    ids."""
    try:
        tokenizer = FastTokenizer.from_json_str(reference.to_str())
        encoder = FastEncoder(tokenizer, word_end_pattern(reference))
        differs = next(
            (text for text in _samples(reference) if not _gives_same_ids(encoder, reference, text)),
            None,
        )
    # The library raises bare errors for what it does not know.
    except Exception as error:
        log.info("fast_tokenizer_unsupported", error=str(error))
        return None
    if differs is not None:
        log.info("fast_tokenizer_differs", text=differs)
        return None
    return encoder


def word_end_pattern(reference: tokenizers.Tokenizer) -> re.Pattern[str] | None:
    """Return a pattern of places where the tokenizer always ends a word: a letter or digit,
    followed by a character of ``WORD_ENDS``. A character, such as the comma, is included if the
    tokenizer splits both ``a,a`` and ``7,7`` at it. Return None if no character is included."""
    ends = [end for end in WORD_ENDS if all(_is_cut(reference, f"{a}{end}{a}") for a in "a7")]
    return re.compile(rf"[^\W_][{re.escape(''.join(ends))}]") if ends else None


def _is_cut(reference: tokenizers.Tokenizer, text: str) -> bool:
    """Return whether the tokenizer splits ``text`` into words so that its first and its last
    character are in different words. Both characters must be the same letter or digit, which occurs
    nowhere between them."""
    letter, normalizer, splitter = text[0], reference.normalizer, reference.pre_tokenizer
    text = normalizer.normalize_str(text) if normalizer is not None else text
    words = splitter.pre_tokenize_str(text) if splitter is not None else [(text, (0, 0))]
    return all(word.count(letter) < 2 for word, _ in words)


def _samples(reference: tokenizers.Tokenizer) -> list[str]:
    """Return the texts on which the encoders are compared: each of SAMPLES, one text that joins all
    of them, and one text for each added token (for the first 256)."""
    added = [token.content for token in reference.get_added_tokens_decoder().values()][:256]
    around = [f"a{token}b {token} c{token}{token}\n{token}" for token in added]
    return [*SAMPLES, "\n".join(SAMPLES), *around]


def _gives_same_ids(encoder: FastEncoder, reference: tokenizers.Tokenizer, text: str) -> bool:
    return all(
        encoder.encode(text, special) == reference.encode(text, add_special_tokens=special).ids
        for special in (False, True)
    )
