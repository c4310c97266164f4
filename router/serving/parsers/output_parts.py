"""The parts of an answer, as they arrive."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TextPart:
    text: str


@dataclass(frozen=True, slots=True)
class ReasoningPart:
    """A piece of the reasoning before an answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """The start of a tool call. ``index`` counts the calls of one answer from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """A piece of a call's arguments. The concatenated pieces are JSON if the model wrote valid
    JSON."""

    index: int
    arguments: str


OutputPart = TextPart | ReasoningPart | ToolCallStart | ToolCallArguments
