"""Tests that the fast encoder returns the reference tokenizer's token ids, or is not used."""

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, trainers

from baton.config import DEMO_MODEL
from baton.text.fast_encoder import (
    WINDOW_CHARACTERS,
    FastEncoder,
    make_fast_encoder,
    word_end_pattern,
)
from baton.text.tokenizer import Tokenizer

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "größer façade naïve 日本語 🎉🎊 12 345",
] * 4
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def trained(pattern: str, normalizer: normalizers.Normalizer | None) -> tokenizers.Tokenizer:
    """Train a tokenizer that, like Llama 3's and Qwen's, splits text by ``pattern``, and then into
    bytes."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=380,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<tool_call>"), AddedToken("日本")])
    return tokenizer


REFERENCES = {
    "demo": tokenizers.Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json")),
    "llama3": trained(LLAMA3, None),
    "qwen2": trained(QWEN2, normalizers.NFC()),
}
ENCODERS = {name: make_fast_encoder(reference) for name, reference in REFERENCES.items()}

PIECES = st.one_of(
    st.text(),
    st.sampled_from([*SPECIAL, "<tool_call>", "日本", " ", "\n", "\t", "  ", "\r\n", "'s", "'LL"]),
    st.text("0123456789 abcXYZ.,;-_\n", max_size=12),
)


@pytest.mark.parametrize("name", REFERENCES)
@given(pieces=st.lists(PIECES, max_size=12), special=st.booleans())
def test_fast_encoder_equals_the_reference(name: str, pieces: list[str], special: bool) -> None:
    encoder, text = ENCODERS[name], "".join(pieces)
    assert encoder is not None
    expected = REFERENCES[name].encode(text, add_special_tokens=special).ids
    assert encoder.encode(text, special) == expected


def test_unsupported_tokenizer_uses_the_reference() -> None:
    words = {"<unk>": 0, "a": 1, "b": 2}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    assert make_fast_encoder(tokenizer) is None
    assert Tokenizer(tokenizer, None, byte_level=False).encode("a b c") == [1, 2, 0]


def test_fast_encoder_that_differs_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FastEncoder, "encode", lambda self, text, special: [1, 2, 3])
    assert make_fast_encoder(REFERENCES["demo"]) is None


def test_text_that_exceeds_the_match_limit_uses_the_reference() -> None:
    class GivesUp:
        def encode(self, text: str, add_special_tokens: bool) -> None:
            raise RuntimeError("match limit exceeded")

    assert FastEncoder(GivesUp(), None).encode("text", False) is None


LONG = 2 * WINDOW_CHARACTERS + 1


@pytest.mark.parametrize("name", REFERENCES)
@pytest.mark.parametrize(
    "word", ["a", " ", "\n", "7", ",_", "\x1c,", "漢", "é", "a-", "<|im_end|>"]
)
def test_long_words_use_the_reference(name: str, word: str) -> None:
    """The fast encoder leaves a text with a long word to the reference, wherever the word is in the
    text: the fast encoder's library would keep memory in proportion to the word's length."""
    encoder, words = ENCODERS[name], "some words. " * WINDOW_CHARACTERS
    assert encoder is not None
    long = word * LONG
    for text in (long, words + long, long + words, words[:-7] + long + words):
        assert encoder.encode(text, False) is None


@pytest.mark.parametrize("name", REFERENCES)
@pytest.mark.parametrize("word", ["word ", "漢字かな交じり文、", '{"a":1,', "def f(x):\n"])
def test_long_text_of_usual_words_uses_the_fast_encoder(name: str, word: str) -> None:
    encoder, text = ENCODERS[name], word * WINDOW_CHARACTERS
    assert encoder is not None
    assert (
        encoder.encode(text, False) == REFERENCES[name].encode(text, add_special_tokens=False).ids
    )


def test_without_word_boundaries_long_texts_use_the_reference() -> None:
    """As in Llama 2 and Gemma, spaces become an ordinary character, so that nothing separates
    words."""
    tokenizer = trained(LLAMA3, normalizers.Replace(" ", "▁"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    assert word_end_pattern(tokenizer) is None
    encoder = make_fast_encoder(tokenizer)
    assert encoder is not None
    assert encoder.encode("word " * 400, False) == tokenizer.encode("word " * 400).ids
    assert encoder.encode("word " * WINDOW_CHARACTERS, False) is None


def test_word_end_pattern_follows_the_pre_tokenizer() -> None:
    """This pre-tokenizer splits only at spaces, so words end only there."""
    tokenizer = trained(LLAMA3, None)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    end = word_end_pattern(tokenizer)
    assert end is not None
    assert (bool(end.search("a b")), bool(end.search("a,b")), bool(end.search(" ."))) == (
        True,
        False,
        False,
    )
