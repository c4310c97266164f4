"""Marks of a model's markup in grammars: as tokens of its own, where its vocabulary has them."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from baton.text.tokenizer import Tokenizer

MARKUP_STRINGS = ("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]",
                  "[CALL_ID]", "<think>", "</think>")  # fmt: skip


@dataclass(frozen=True, slots=True)
class MarkupTokens:
    """``ids`` of those that are tokens which no text is spelt with. A grammar that names only the
    text would keep a model from writing them as it has learnt to."""

    ids: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "MarkupTokens":
        added = tokenizer.added_ids
        found = ((mark, tokenizer.token_id(mark)) for mark in MARKUP_STRINGS)
        return cls({mark: id_ for mark, id_ in found if id_ is not None and id_ in added})

    def rule(self, mark: str) -> str:
        """One mark, as a part of a rule."""
        text = json.dumps(mark)
        return f"(<[{self.ids[mark]}]> | {text})" if mark in self.ids else text

    def until(self, name: str, mark: str) -> list[str]:
        """A rule of that name: any text up to the first such mark, and with it."""
        if mark not in self.ids:
            return [f"{name}[suffix={json.dumps(mark)}]: /(?s:.*)/"]
        return [
            f"{name}: {name}_spelt | {name.upper()}_TEXT? <[{self.ids[mark]}]>",
            f"{name}_spelt[suffix={json.dumps(mark)}]: /(?s:.*)/",
            f"{name.upper()}_TEXT: {terminal_without(mark)}",
        ]


NO_MARKUP_TOKENS = MarkupTokens()


def terminal_without(mark: str, pattern: str = "(?s:.+)") -> str:
    """A terminal: text of that pattern in which the mark is not spelt."""
    spelt = "".join(each if each.isalnum() else f"\\x{{{ord(each):x}}}" for each in mark)
    return f"/{pattern}/ & ~/(?s:.*){spelt}(?s:.*)/"
