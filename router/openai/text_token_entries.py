"""Selects the tokens that became text of an answer: not those of reasoning, calls and the end."""

from collections.abc import Sequence

from router.openai.choice_stream import ChoiceDelta
from router.openai.parsers.output_parts import TextPart
from router.openai.token_entry import TokenEntry


class TextTokenEntries:
    """Selects from the deltas of one answer, in their order. If a token's text is held back, its
    entry comes with the delta that has the text."""

    def __init__(self) -> None:
        self._pending: list[TokenEntry] = []

    def take(self, delta: ChoiceDelta) -> Sequence[TokenEntry]:
        """Return the entries of the tokens that became this delta's text."""
        if delta.text or any(isinstance(part, TextPart) for part in delta.parts):
            entries = [*self._pending, *delta.token_entries]
            self._pending.clear()
            return entries
        if delta.parts:
            self._pending.clear()
        else:
            self._pending += delta.token_entries
        return ()
