"""Splits an answer's text into reasoning, text and tool calls, as it arrives."""

from router.openai.parsers.output_parts import OutputPart, TextPart, ToolCallStart
from router.openai.parsers.reasoning_parser import ReasoningParser
from router.openai.parsers.tool_call_parser import ToolCallParser


class OutputParser:
    """Parses reasoning first, then text and calls. If ``tool_call_parser`` is None, everything
    after the reasoning is text. ``max_calls`` limits the number of calls, for example to 1 for a
    client that can't handle parallel calls; None means no limit. When a call beyond ``max_calls``
    begins, ``has_enough_calls`` is set, and the rest of the answer can be skipped."""

    def __init__(
        self,
        reasoning_parser: ReasoningParser | None,
        tool_call_parser: ToolCallParser | None,
        max_calls: int | None = None,
    ) -> None:
        self._reasoning_parser = reasoning_parser
        self._tool_call_parser = tool_call_parser
        self._max_calls = max_calls
        self.has_enough_calls = False

    @property
    def is_in_reasoning(self) -> bool:
        return self._reasoning_parser is not None and self._reasoning_parser.in_reasoning

    @property
    def has_tool_calls(self) -> bool:
        return self._tool_call_parser is not None and self._tool_call_parser.num_calls > 0

    def push(self, text: str) -> list[OutputPart]:
        pieces: list[OutputPart] = [TextPart(text)] if text else []
        if self._reasoning_parser is not None:
            pieces = self._reasoning_parser.push(text)
        return self._parse(pieces)

    def flush(self) -> list[OutputPart]:
        """End the input and return the parts that were held back."""
        pieces = self._parse(
            self._reasoning_parser.flush() if self._reasoning_parser is not None else []
        )
        if self._tool_call_parser is not None:
            pieces += self._limit_calls(self._tool_call_parser.flush())
        return pieces

    def _parse(self, pieces: list[OutputPart]) -> list[OutputPart]:
        if self._tool_call_parser is None:
            return pieces
        parsed: list[OutputPart] = []
        for piece in pieces:
            parsed += (
                self._tool_call_parser.push(piece.text) if isinstance(piece, TextPart) else [piece]
            )
        return self._limit_calls(parsed)

    def _limit_calls(self, pieces: list[OutputPart]) -> list[OutputPart]:
        if self._max_calls is None:
            return pieces
        for position, piece in enumerate(pieces):
            if isinstance(piece, ToolCallStart) and piece.index >= self._max_calls:
                self.has_enough_calls = True
                return pieces[:position]
        return pieces
