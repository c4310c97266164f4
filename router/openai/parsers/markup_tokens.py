"""Converts a model's markup strings, such as ``<tool_call>``, to parts of grammars. These parts
also match the model's special tokens for the strings."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from baton.text.tokenizer import Tokenizer

MARKUP_STRINGS = ("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]",
                  "[CALL_ID]", "<think>", "</think>")  # fmt: skip


@dataclass(frozen=True, slots=True)
class MarkupTokens:
    """Ids of the markup strings that are special tokens of the model. A grammar that allows only
    the text of such a string would keep the model from writing the special token, which it was
    trained to write."""

    ids: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "MarkupTokens":
        added = tokenizer.added_ids
        found = ((mark, tokenizer.token_id(mark)) for mark in MARKUP_STRINGS)
        return cls({mark: id_ for mark, id_ in found if id_ is not None and id_ in added})

    def rule(self, mark: str) -> str:
        """Return the part of a grammar rule that matches a markup string."""
        text = json.dumps(mark)
        return f"(<[{self.ids[mark]}]> | {text})" if mark in self.ids else text

    def rules_until(self, name: str, mark: str) -> list[str]:
        """Return grammar rules that define ``name``: any text up to and including the first markup
        string ``mark``."""
        if mark not in self.ids:
            return [f"{name}[suffix={json.dumps(mark)}]: /(?s:.*)/"]
        return [
            f"{name}: {name}_spelt | {name.upper()}_TEXT? <[{self.ids[mark]}]>",
            f"{name}_spelt[suffix={json.dumps(mark)}]: /(?s:.*)/",
            f"{name.upper()}_TEXT: {terminal_without(mark)}",
        ]


NO_MARKUP_TOKENS = MarkupTokens()


def terminal_without(mark: str, pattern: str = "(?s:.+)") -> str:
    """Return a grammar terminal for text that matches the pattern and does not contain the markup
    string."""
    spelt = "".join(each if each.isalnum() else f"\\x{{{ord(each):x}}}" for each in mark)
    return f"/{pattern}/ & ~/(?s:.*){spelt}(?s:.*)/"
