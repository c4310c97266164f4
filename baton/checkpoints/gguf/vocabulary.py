"""Builds a model's tokenizer from the vocabulary in a GGUF file.

GGUF has two kinds that matter here: ``gpt2``, byte-level BPE with its merges, whose pre-tokenizer
is only named (``tokenizer.ggml.pre``); and ``llama``, SentencePiece's BPE, in which a merge is as
good as the score of the piece that it makes.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from baton.checkpoints.gguf.metadata import GgufFile
from baton.errors import Invalid

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Types of tokens in ``tokenizer.ggml.token_type``."""

SPECIAL = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
SPACE = "▁"

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|"
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
TEKKEN_WORDS = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{UPPER}]*[{LOWER}]+|[^\r\n\p{{L}}\p{{N}}]?[{UPPER}]+[{LOWER}]*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _gpt2() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def _digits() -> Any:
    """GPT-2's words, with each digit a word of its own."""
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _split(words: str) -> Callable[[], Any]:
    def make() -> Any:
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(words), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )

    return make


_LLAMA3, _QWEN2 = (_split(CONTRACTIONS + WORDS % digits) for digits in (r"\p{N}{1,3}", r"\p{N}"))
PRE_TOKENIZERS: dict[str, Callable[[], Any]] = {
    "gpt-2": _gpt2,
    "smollm": _digits,
    "starcoder": _digits,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": _split(TEKKEN_WORDS),
}
"""By the names that llama.cpp gives the pre-tokenizers of the supported architectures."""

NORMALIZED = ("qwen2", "deepseek-r1-qwen")
"""Pre-tokenizers before which a text is brought into Unicode's form NFC."""

WHOLE_WORDS = ("llama3", "llama-v3", "llama-bpe", "tekken")
"""With these, a word that is a token is never split, whatever the merges say."""


def make_tokenizer(file: GgufFile) -> tokenizers.Tokenizer:
    """Return the tokenizer. Raises Invalid for a kind that is not supported."""
    kind = file.require("tokenizer.ggml.model", str)
    if kind not in ("gpt2", "llama"):
        raise Invalid(
            f"{file.path}: tokenizer.ggml.model is {kind!r}; supported kinds: gpt2 (byte-level "
            "BPE) and llama (SentencePiece)"
        )
    tokenizer = _byte_level(file) if kind == "gpt2" else _sentence_piece(file)
    _add_tokens(file, tokenizer)
    # llama.cpp's defaults for files that don't say.
    adds_bos = kind == "llama" or file.get("tokenizer.ggml.pre") in WHOLE_WORDS
    first = _ends(file, "bos", adds_bos)
    last = _ends(file, "eos", False)
    if first or last:
        single = [*first, "$A", *last]
        second = [*(f"{token}:1" for token in first), "$B:1", *(f"{token}:1" for token in last)]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=single,
            pair=[*single, *second],
            special_tokens=[(token, tokenizer.token_to_id(token)) for token in {*first, *last}],
        )
    return tokenizer


def tokenizer_config(file: GgufFile) -> dict[str, Any]:
    """Return the content of tokenizer_config.json: special tokens, and the chat template."""
    tokens = _tokens(file)
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for name, key in SPECIAL.items():
        token = file.get(f"tokenizer.ggml.{name}_token_id")
        if token is not None and token < len(tokens):
            config[key] = tokens[token]
    names = file.get("tokenizer.chat_templates", [])
    templates = {
        "default": file.get("tokenizer.chat_template"),
        **{name: file.get(f"tokenizer.chat_template.{name}") for name in names},
    }
    found = [{"name": name, "template": text} for name, text in templates.items() if text]
    if found:
        only = len(found) == 1 and found[0]["name"] == "default"
        config["chat_template"] = found[0]["template"] if only else found
    return config


def _byte_level(file: GgufFile) -> tokenizers.Tokenizer:
    pre = file.get("tokenizer.ggml.pre", "default")
    if pre not in PRE_TOKENIZERS:
        raise Invalid(
            f"{file.path}: tokenizer.ggml.pre is {pre!r}; supported pre-tokenizers: "
            f"{', '.join(PRE_TOKENIZERS)}"
        )
    merges = [tuple(merge.split(" ")) for merge in file.require("tokenizer.ggml.merges", list)]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(_ids(file), merges, ignore_merges=pre in WHOLE_WORDS)
    )
    if pre in NORMALIZED:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentence_piece(file: GgufFile) -> tokenizers.Tokenizer:
    ids = _ids(file)
    unknown = file.get("tokenizer.ggml.unknown_token_id", 0)
    tokens = file.require("tokenizer.ggml.tokens", list)
    has_bytes = BYTE in file.require("tokenizer.ggml.token_type", list)
    tokenizer = tokenizers.Tokenizer(
        models.BPE(
            ids, _merges(file, ids), unk_token=tokens[unknown], fuse_unk=True,
            byte_fallback=has_bytes,
        )
    )  # fmt: skip
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if file.get("tokenizer.ggml.add_space_prefix", True):
        # a text begins with a space, but not what follows a special token
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, "first", split=False)
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _merges(file: GgufFile, ids: dict[str, int]) -> list[tuple[str, str]]:
    """Return the merges of SentencePiece's pieces, best first. Two pieces are merged if they
    together are a piece; the better that piece's score, the sooner. User-defined pieces come before
    all others."""
    scores = file.require("tokenizer.ggml.scores", list)
    types = file.require("tokenizer.ggml.token_type", list)
    ranked: list[tuple[float, int, int, int, str, str]] = []
    for piece, token in ids.items():
        if types[token] not in (NORMAL, USER_DEFINED):
            continue
        rank = -math.inf if types[token] == USER_DEFINED else -scores[token]
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in ids and right in ids:
                ranked.append((rank, len(piece), ids[left], ids[right], left, right))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]


def _ids(file: GgufFile) -> dict[str, int]:
    return {token: index for index, token in enumerate(_tokens(file))}


def _tokens(file: GgufFile) -> list[str]:
    """Return the tokens by id. For SentencePiece, llama.cpp writes the pieces that consist of
    spaces with plain ones."""
    tokens: list[str] = file.require("tokenizer.ggml.tokens", list)
    is_byte_level = file.get("tokenizer.ggml.model") == "gpt2"
    return tokens if is_byte_level else [token.replace(" ", SPACE) for token in tokens]


def _add_tokens(file: GgufFile, tokenizer: tokenizers.Tokenizer) -> None:
    """Add the tokens that are found before a text is split into words."""
    tokens = _tokens(file)
    types: Sequence[int] = file.get("tokenizer.ggml.token_type", [NORMAL] * len(tokens))
    added = [
        AddedToken(token, special=kind != USER_DEFINED, normalized=False)
        for token, kind in zip(tokens, types, strict=True)
        if kind in (UNKNOWN, CONTROL, USER_DEFINED)
    ]
    tokenizer.add_tokens([token for token in added if not token.special])
    tokenizer.add_special_tokens([token for token in added if token.special])


def _ends(file: GgufFile, name: str, default: bool) -> list[str]:
    """Return the token that is added to each text as its first or last one, if any."""
    token = file.get(f"tokenizer.ggml.{name}_token_id")
    if token is None or not file.get(f"tokenizer.ggml.add_{name}_token", default):
        return []
    return [_tokens(file)[token]]
