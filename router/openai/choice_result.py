"""One choice, as it has come so far."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.core.ids import TokenId
from router.openai.choice_stream import ChoiceDelta
from router.openai.parsers.output_parts import (
    OutputPart,
    ReasoningPart,
    TextPart,
    ToolCallArguments,
    ToolCallStart,
)
from router.openai.token_entry import TokenEntry


@dataclass(slots=True)
class ChoiceResult:
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

    def add(self, delta: ChoiceDelta) -> None:
        self.prompt_entries = self.prompt_entries or delta.prompt_entries
        self.pieces.append(delta.text)
        for piece in delta.pieces:
            self._add_piece(piece)
        self.token_ids.extend(delta.token_ids)
        self.entries.extend(delta.entries)
        self.finish_reason = delta.finish_reason

    def _add_piece(self, piece: OutputPart) -> None:
        match piece:
            case TextPart(text):
                self.pieces.append(text)
            case ReasoningPart(text):
                self.thoughts.append(text)
            case ToolCallStart(_, name):
                self.calls.append((name, []))
            case ToolCallArguments(index, arguments):
                self.calls[index][1].append(arguments)
