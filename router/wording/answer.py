"""One choice, as it has come so far."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.core.ids import TokenId
from router.choice import Delta
from router.entry import TokenEntry
from router.markup.pieces import CallBegun, CallGrown, Piece, Text, Thought


@dataclass(slots=True)
class Answer:
    """One choice. The prompt's are what is repeated to the client: ``prompt_text`` for echo,
    ``prompt_token_ids`` for return_token_ids. Of ``calls``, name and arguments."""

    index: int
    prompt_token_ids: Sequence[TokenId]
    prompt_text: str = ""
    pieces: list[str] = field(default_factory=list)
    token_ids: list[TokenId] = field(default_factory=list)
    entries: list[TokenEntry] = field(default_factory=list)
    finish_reason: str | None = None
    thoughts: list[str] = field(default_factory=list)
    calls: list[tuple[str, list[str]]] = field(default_factory=list)
    prompt_entries: Sequence[TokenEntry] = ()

    def add(self, delta: Delta) -> None:
        self.prompt_entries = self.prompt_entries or delta.prompt_entries
        self.pieces.append(delta.text)
        for piece in delta.pieces:
            self._add_piece(piece)
        self.token_ids.extend(delta.token_ids)
        self.entries.extend(delta.entries)
        self.finish_reason = delta.finish_reason

    def _add_piece(self, piece: Piece) -> None:
        match piece:
            case Text(text):
                self.pieces.append(text)
            case Thought(text):
                self.thoughts.append(text)
            case CallBegun(_, name):
                self.calls.append((name, []))
            case CallGrown(index, arguments):
                self.calls[index][1].append(arguments)
