"""Converts a model's markup strings, such as ``<tool_call>``, to parts of grammars. These parts
also match the model's special tokens for the strings."""

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from baton.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class MarkupTokens:
    """Ids of the markup strings that are special tokens of the model. A grammar that allows only
    the text of such a string would keep the model from writing the special token, which it was
    trained to write."""

    ids: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, tokenizer: Tokenizer, strings: Collection[str]) -> "MarkupTokens":
        added = tokenizer.added_ids
        found = ((mark, tokenizer.token_id(mark)) for mark in strings)
        return cls({mark: id_ for mark, id_ in found if id_ is not None and id_ in added})

    @cached_property
    def _pieces(self) -> "re.Pattern[str]":
        longest_first = sorted(self.ids, key=len, reverse=True)
        marks = "|".join(map(re.escape, longest_first))
        return re.compile(rf"({marks}|\{{number\}})" if marks else r"(\{number\})")

    def literal(self, text: str) -> str:
        """Return the part of a grammar rule that matches a text. ``{number}`` matches a number."""
        return " ".join(map(self._piece, filter(None, self._pieces.split(text)))) or '""'

    def _piece(self, text: str) -> str:
        if text == "{number}":
            return "/[0-9]{1,3}/"
        literal = json.dumps(text, ensure_ascii=False)
        return f"(<[{self.ids[text]}]> | {literal})" if text in self.ids else literal

    def rules_until(self, name: str, end: str) -> list[str]:
        """Return grammar rules that define ``name``: any text up to and including the first
        ``end``."""
        found = next((piece for piece in self._pieces.split(end) if piece in self.ids), None)
        spelt = f"[suffix={json.dumps(end, ensure_ascii=False)}]: /(?s:.*)/"
        if found is None:
            return [f"{name}{spelt}"]
        after = end.partition(found)[2]
        rest = f" {self.literal(after)}" if after else ""
        # What precedes the token in ``end`` is part of the text, which may be anything.
        return [
            f"{name}: {name}_spelt | {name.upper()}_TEXT? <[{self.ids[found]}]>{rest}",
            f"{name}_spelt{spelt}",
            f"{name.upper()}_TEXT: {terminal_without(found)}",
        ]


NO_MARKUP_TOKENS = MarkupTokens()


def terminal_without(mark: str, pattern: str = "(?s:.+)") -> str:
    """Return a grammar terminal for text that matches the pattern and does not contain the markup
    string."""
    spelt = "".join(each if each.isalnum() else f"\\x{{{ord(each):x}}}" for each in mark)
    return f"/{pattern}/ & ~/(?s:.*){spelt}(?s:.*)/"
