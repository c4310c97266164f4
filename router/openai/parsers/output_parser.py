"""An answer's text, taken apart as it arrives."""

from router.openai.parsers.output_parts import OutputPart, TextPart, ToolCallStart
from router.openai.parsers.reasoning_parser import ReasoningParser
from router.openai.parsers.tool_call_parser import ToolCallParser


class OutputParser:
    """First thoughts, then text and calls. Without ``calls``, what looks like one is text.
    ``max_calls`` is 1 for a client that can't do several at once: once there is ``enough``, what
    follows is of no use."""

    def __init__(
        self,
        thinking: ReasoningParser | None,
        calls: ToolCallParser | None,
        max_calls: int | None = None,
    ) -> None:
        self._thinking = thinking
        self._calls = calls
        self._max_calls = max_calls
        self.enough = False

    @property
    def is_thinking(self) -> bool:
        return self._thinking is not None and self._thinking.inside

    @property
    def has_called(self) -> bool:
        return self._calls is not None and self._calls.num_calls > 0

    def push(self, text: str) -> list[OutputPart]:
        pieces: list[OutputPart] = [TextPart(text)] if text else []
        if self._thinking is not None:
            pieces = self._thinking.push(text)
        return self._parse(pieces)

    def flush(self) -> list[OutputPart]:
        """The text has ended."""
        pieces = self._parse(self._thinking.flush() if self._thinking is not None else [])
        if self._calls is not None:
            pieces += self._limited(self._calls.flush())
        return pieces

    def _parse(self, pieces: list[OutputPart]) -> list[OutputPart]:
        if self._calls is None:
            return pieces
        parsed: list[OutputPart] = []
        for piece in pieces:
            parsed += self._calls.push(piece.text) if isinstance(piece, TextPart) else [piece]
        return self._limited(parsed)

    def _limited(self, pieces: list[OutputPart]) -> list[OutputPart]:
        if self._max_calls is None:
            return pieces
        for position, piece in enumerate(pieces):
            if isinstance(piece, ToolCallStart) and piece.index >= self._max_calls:
                self.enough = True
                return pieces[:position]
        return pieces
