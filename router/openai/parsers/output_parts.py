"""What an answer is made of, as it arrives."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TextPart:
    text: str


@dataclass(frozen=True, slots=True)
class ReasoningPart:
    """A part of the reasoning before an answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """``index`` counts the calls of one answer from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """More of a call's arguments, which together are JSON if the model wrote JSON."""

    index: int
    arguments: str


OutputPart = TextPart | ReasoningPart | ToolCallStart | ToolCallArguments
