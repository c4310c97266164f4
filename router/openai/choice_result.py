"""The accumulated result of one choice."""

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
    """One choice, accumulated from its deltas. ``prompt_text`` is the prompt if it is echoed, else
    empty; ``prompt_token_ids`` are sent only for ``return_token_ids``. ``tool_calls`` has for each
    call its name and the pieces of its arguments. ``parts`` are all parts of a parsed answer in
    order, and ``part_ends`` has for each part the number of ``token_entries`` up to the end of its
    delta; both are empty if the answer is not parsed. ``stop_string`` is the stop string that ended
    the answer, or None."""

    index: int
    prompt_token_ids: Sequence[TokenId]
    prompt_text: str = ""
    text_pieces: list[str] = field(default_factory=list)
    token_ids: list[TokenId] = field(default_factory=list)
    token_entries: list[TokenEntry] = field(default_factory=list)
    finish_reason: str | None = None
    reasoning_pieces: list[str] = field(default_factory=list)
    tool_calls: list[tuple[str, list[str]]] = field(default_factory=list)
    prompt_token_entries: Sequence[TokenEntry] = ()
    parts: list[OutputPart] = field(default_factory=list)
    part_ends: list[int] = field(default_factory=list)
    stop_string: str | None = None

    def add(self, delta: ChoiceDelta) -> None:
        self.prompt_token_entries = self.prompt_token_entries or delta.prompt_token_entries
        self.text_pieces.append(delta.text)
        self.parts.extend(delta.parts)
        for piece in delta.parts:
            self._add_part(piece)
        self.token_ids.extend(delta.token_ids)
        self.token_entries.extend(delta.token_entries)
        self.part_ends += [len(self.token_entries)] * len(delta.parts)
        self.finish_reason = delta.finish_reason
        self.stop_string = delta.stop_string

    def _add_part(self, piece: OutputPart) -> None:
        match piece:
            case TextPart(text):
                self.text_pieces.append(text)
            case ReasoningPart(text):
                self.reasoning_pieces.append(text)
            case ToolCallStart(_, name):
                self.tool_calls.append((name, []))
            case ToolCallArguments(index, arguments):
                self.tool_calls[index][1].append(arguments)
