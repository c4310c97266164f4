"""The accumulated result of one choice."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.core.ids import TokenId
from router.openai.answer_parts import AnswerParts
from router.openai.choice_stream import ChoiceDelta
from router.openai.parsers.output_parts import (
    ReasoningPart,
    TextPart,
    ToolCallArguments,
    ToolCallStart,
)
from router.openai.text_buffer import TextBuffer
from router.openai.token_entry import TokenEntry


@dataclass(slots=True)
class ChoiceResult:
    """One choice, accumulated from its deltas. ``prompt_text`` is the prompt if it is echoed, else
    empty; ``prompt_token_ids`` are sent only for ``return_token_ids``. An answer is either parsed,
    then it has ``parts``, or it has ``unparsed_text``. ``token_ids`` has 64-bit integers.
    ``stop_string`` is the stop string that ended the answer, or None."""

    index: int
    prompt_token_ids: Sequence[TokenId]
    prompt_text: str = ""
    unparsed_text: TextBuffer = field(default_factory=TextBuffer)
    parts: AnswerParts = field(default_factory=AnswerParts)
    token_ids: "array[int]" = field(default_factory=lambda: array("q"))
    token_entries: list[TokenEntry] = field(default_factory=list)
    finish_reason: str | None = None
    prompt_token_entries: Sequence[TokenEntry] = ()
    stop_string: str | None = None

    def add(self, delta: ChoiceDelta) -> None:
        self.prompt_token_entries = self.prompt_token_entries or delta.prompt_token_entries
        self.unparsed_text.append(delta.text)
        self.token_ids.extend(delta.token_ids)
        self.token_entries.extend(delta.token_entries)
        for part in delta.parts:
            self.parts.add(part, len(self.token_entries))
        for index in delta.cut_calls:
            self.parts.remove_call(index)
        self.finish_reason = delta.finish_reason
        self.stop_string = delta.stop_string

    @property
    def text(self) -> str:
        """The text of the answer, without reasoning and tool calls."""
        texts = [part.text for part in self.parts if isinstance(part, TextPart)]
        return self.unparsed_text.text + "".join(texts)

    @property
    def reasoning(self) -> str:
        return "".join(part.text for part in self.parts if isinstance(part, ReasoningPart))

    @property
    def tool_calls(self) -> list[tuple[ToolCallStart, str]]:
        """The calls and their arguments, in order."""
        calls: dict[int, tuple[ToolCallStart, list[str]]] = {}
        for part in self.parts:
            match part:
                case ToolCallStart(index):
                    calls[index] = (part, [])
                case ToolCallArguments(index, arguments):
                    calls[index][1].append(arguments)
        return [(call, "".join(arguments)) for call, arguments in calls.values()]
