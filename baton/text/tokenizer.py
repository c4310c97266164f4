"""A model's tokenizer and chat template, loaded from the model's directory."""

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import tokenizers

from baton.clock import Clock, SystemClock
from baton.errors import Invalid
from baton.text.chat_template import ChatTemplate
from baton.text.detokenizer import (
    ByteLevelDetokenizer,
    IncrementalDetokenizer,
    WindowDetokenizer,
    byte_level_alphabet,
    byte_level_bytes,
)
from baton.text.fast_encoder import make_fast_encoder
from baton.text.template_rules import Message

SPECIAL_TOKEN_NAMES = (
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
)  # fmt: skip

TYPICAL_CHARACTERS_PER_TOKEN = 4
"""An average for most languages. :meth:`Tokenizer.exceeds_tokens` does not encode a text with at
most this many characters per allowed token."""

MAX_TOKENS_PER_CUT = 64
"""Upper bound of the tokens that one cut adds to a text: the two halves of a word take a few more
tokens than the whole word."""

PIECE_CHARACTERS = 64 * 1024

_BYTE_LEVEL_BYTES = byte_level_bytes(byte_level_alphabet())


class Tokenizer:
    """Converts text to token ids and back. Thread-safe; immutable after loading. With
    ``uses_fast_encoder``, a fast encoder is built, which takes most of a second for a large
    vocabulary."""

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        chat_template: ChatTemplate | None,
        *,
        byte_level: bool,
        uses_fast_encoder: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._fast = make_fast_encoder(tokenizer) if uses_fast_encoder else None
        self._chat_template = chat_template
        self._byte_level = byte_level
        ids = set(tokenizer.get_vocab(with_added_tokens=True).values())
        self.vocab_size = 1 + max(ids, default=-1)
        added = tokenizer.get_added_tokens_decoder().items()
        self.added_ids = frozenset(token_id for token_id, _ in added)
        self.special_ids = frozenset(token_id for token_id, token in added if token.special)
        self._hidden = self.special_ids | (set(range(self.vocab_size)) - ids)
        self.token_bytes = lru_cache(maxsize=self.vocab_size)(self._token_bytes)
        self.visible_bytes = lru_cache(maxsize=self.vocab_size)(self._visible_bytes)

    @classmethod
    def load(
        cls, model_dir: Path, clock: Clock | None = None, *, uses_fast_encoder: bool = True
    ) -> "Tokenizer":
        """Read ``tokenizer.json`` and, if they exist, ``tokenizer_config.json``,
        ``special_tokens_map.json`` and ``chat_template.jinja``.

        Raises Invalid, naming the file, if a required file is missing, a file is malformed, or the
        vocabulary is larger than the one in the model's ``config.json``.
        """
        path = model_dir / "tokenizer.json"
        tokenizer = load_tokenizer(path)
        template = _load_chat_template(model_dir, clock or SystemClock())
        is_byte_level = _is_byte_level(tokenizer)
        loaded = cls(
            tokenizer, template, byte_level=is_byte_level, uses_fast_encoder=uses_fast_encoder
        )
        limit = _model_vocab_size(model_dir)
        if limit is not None and loaded.vocab_size > limit:
            raise Invalid(
                f"{path}: the tokenizer has {loaded.vocab_size} tokens, but the model's vocabulary "
                f"has only {limit}"
            )
        return loaded

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids = self._fast.encode(text, add_special_tokens) if self._fast is not None else None
        if ids is None:
            # Unlike the library's ``encode``, this releases the GIL and computes no offsets.
            encodings = self._tokenizer.encode_batch_fast(
                [text], add_special_tokens=add_special_tokens
            )
            ids = encodings[0].ids
        return ids

    def exceeds_tokens(self, text: str, max_tokens: int) -> bool:
        """Return whether ``text`` certainly has more than ``max_tokens`` tokens, without encoding
        all of it. False only guarantees that encoding the text takes memory and time in proportion
        to ``max_tokens``.

        The text is encoded in pieces until they certainly have more tokens than allowed. Since
        cutting a text may add tokens, :data:`MAX_TOKENS_PER_CUT` are subtracted for each piece.
        """
        if len(text) <= TYPICAL_CHARACTERS_PER_TOKEN * max_tokens:
            return False
        counted = 0
        for start in range(0, len(text), PIECE_CHARACTERS):
            piece = text[start : start + PIECE_CHARACTERS]
            counted += len(self.encode(piece, add_special_tokens=False)) - MAX_TOKENS_PER_CUT
            if counted > max_tokens:
                return True
        return False

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Decode token ids. Ids outside of the tokenizer's vocabulary are skipped (the model's
        vocabulary may be padded)."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    @property
    def chat_template_source(self) -> str:
        """The source of the chat template, or of all chat templates if there are several; empty if
        there is none."""
        return self._chat_template.source if self._chat_template is not None else ""

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
        *,
        max_characters: int,
    ) -> str:
        """Render messages to a prompt of at most ``max_characters``. Raises Invalid when the model
        has no template, its template fails, or the prompt is longer."""
        if self._chat_template is None:
            raise Invalid("the model has no chat template; use /v1/completions", param="messages")
        return self._chat_template.render(
            messages, tools, add_generation_prompt, variables, max_characters=max_characters
        )

    def make_detokenizer(
        self, visible_special_ids: frozenset[int] = frozenset()
    ) -> IncrementalDetokenizer:
        """Return a new detokenizer, which skips special tokens, except those in
        ``visible_special_ids``."""
        if self._byte_level:
            return ByteLevelDetokenizer(self, visible_special_ids)
        return WindowDetokenizer(self, visible_special_ids)

    def token_id(self, token: str) -> int | None:
        """Return the id of a token in the vocabulary's spelling; None for an unknown token."""
        token_id: int | None = self._tokenizer.token_to_id(token)
        return token_id

    # Single tokens, for detokenizers and logprobs

    def is_hidden(self, token_id: int) -> bool:
        return token_id in self._hidden or token_id >= self.vocab_size

    def token(self, token_id: int) -> str:
        """Return a token in the vocabulary's spelling; empty for an unknown id."""
        return self._tokenizer.id_to_token(token_id) or ""

    def decode_visible(self, token_ids: Sequence[int]) -> str:
        return self.decode(token_ids, skip_special_tokens=True)

    def _token_bytes(self, token_id: int) -> bytes:
        """Return the token's bytes, which need not be whole characters."""
        if self._byte_level:
            return _BYTE_LEVEL_BYTES(self.token(token_id))
        token = self.token(token_id)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes.fromhex(token[3:5])
        return token.replace("▁", " ").encode()

    def _visible_bytes(self, token_id: int) -> bytes:
        return b"" if self.is_hidden(token_id) else self.token_bytes(token_id)


def load_tokenizer(path: Path) -> tokenizers.Tokenizer:
    if not path.is_file():
        raise Invalid(f"{path}: the file is missing")
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    # The library raises bare Exceptions for whatever it can't read.
    except Exception as error:
        raise Invalid(f"{path}: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _is_byte_level(tokenizer: tokenizers.Tokenizer) -> bool:
    """Whether the tokenizer is byte-level BPE. Only its decoder is inspected, since serializing a
    large vocabulary takes a fifth of a second."""
    if tokenizer.decoder is None:
        return False
    decoder = json.loads(tokenizer.decoder.__getstate__())
    while decoder["type"] == "Sequence" and len(decoder["decoders"]) == 1:
        decoder = decoder["decoders"][0]
    return bool(decoder["type"] == "ByteLevel")


def _load_chat_template(model_dir: Path, clock: Clock) -> ChatTemplate | None:
    config = _read_json(model_dir / "tokenizer_config.json")
    named = _named_templates(model_dir, config)
    if "default" not in named:
        return None
    special = _read_json(model_dir / "special_tokens_map.json") | config
    variables = {name: _content(special[name]) for name in SPECIAL_TOKEN_NAMES if special.get(name)}
    try:
        return ChatTemplate(named, variables, clock)
    except Invalid as error:
        raise Invalid(f"{model_dir}: {error}") from error


def _named_templates(model_dir: Path, config: dict[str, Any]) -> dict[str, str]:
    """Return the templates by name. A separate file takes precedence over the config, as in
    transformers."""
    path = model_dir / "chat_template.jinja"
    if path.is_file():
        try:
            return {"default": path.read_text(encoding="utf-8")}
        except UnicodeDecodeError as error:
            raise Invalid(f"{path}: the file is not UTF-8 text") from error
    template = config.get("chat_template")
    if template is None:
        return {}
    if isinstance(template, str):
        return {"default": template}
    try:
        return {str(entry["name"]): str(entry["template"]) for entry in template}
    except (TypeError, KeyError) as error:
        place = model_dir / "tokenizer_config.json"
        raise Invalid(
            f"{place}: chat_template must be a string, or a list of objects with name and template"
        ) from error


def _content(token: Any) -> str:
    """Return the text of a special token, which the config has as a string or as an object with
    the field ``content``."""
    return str(token["content"]) if isinstance(token, dict) else str(token)


def _model_vocab_size(model_dir: Path) -> int | None:
    config = _read_json(model_dir / "config.json")
    size = config.get("vocab_size")
    return size if isinstance(size, int) else None


def _read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file; return an empty dict if there is no such file. Raises Invalid
    if the file is not a JSON object."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise Invalid(f"{path}: {error}") from error
    if not isinstance(value, dict):
        raise Invalid(f"{path}: the file is not a JSON object")
    return value
