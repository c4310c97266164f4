"""Tests how much white space the parsers of tool calls and reasoning hold back: 10,000 tokens of it
arrive in each of their states."""

from collections.abc import Callable

import pytest

from router.openai.parsers.held_whitespace import MAX_HELD_WHITESPACE
from router.openai.parsers.hermes import HermesToolParser
from router.openai.parsers.llama3 import Llama3ToolParser
from router.openai.parsers.mistral import MistralToolParser
from router.openai.parsers.output_parser import OutputParser
from router.openai.parsers.output_parts import (
    OutputPart,
    ReasoningPart,
    TextPart,
    ToolCallArguments,
    ToolCallStart,
)
from router.openai.parsers.pythonic import PythonicToolParser
from router.openai.parsers.reasoning_parser import ReasoningParser
from router.openai.parsers.tool_call_parser import ToolCallParser

TOKEN = " \n\t " * 32
NUM_TOKENS = 10_000
SPACE = TOKEN * NUM_TOKENS
EXCESS = SPACE[:-MAX_HELD_WHITESPACE]
"""The part of SPACE that is text before a call. The rest belongs to the call's markup."""
MAX_HELD = MAX_HELD_WHITESPACE + len("<function=")
"""White space, and the start of markup before or after it."""

F = '{"name": "f", "arguments": {"x": 1}}'
CALL = f"<tool_call>{F}</tool_call>"


def hermes() -> ToolCallParser:
    return HermesToolParser({"f": {}})


def llama3() -> ToolCallParser:
    return Llama3ToolParser({"f"})


def pythonic() -> ToolCallParser:
    return PythonicToolParser({"f"})


def read(pieces: list[OutputPart]) -> tuple[str, list[str]]:
    """Return the text, and the arguments of each call of ``f``."""
    calls: list[str] = []
    for piece in pieces:
        if isinstance(piece, ToolCallStart):
            assert piece == ToolCallStart(len(calls), "f")
            calls.append("")
        elif isinstance(piece, ToolCallArguments):
            calls[-1] += piece.arguments
    return "".join(piece.text for piece in pieces if isinstance(piece, TextPart)), calls


X = '{"x": 1}'

CASES: list[tuple[Callable[[], ToolCallParser], str, str, str, int]] = [
    # the parser, the answer before and after the white space, its text, the number of its calls
    (hermes, "", CALL, EXCESS, 1),
    (hermes, "Hi", CALL, "Hi" + EXCESS, 1),
    (hermes, "Hi", "there", f"Hi{SPACE}there", 0),
    (hermes, "Hi", "", f"Hi{SPACE}", 0),
    (hermes, CALL, CALL, "", 2),
    (hermes, CALL, "", "", 1),
    (hermes, CALL, "Hi", "Hi", 1),
    (hermes, "<tool_call>", f"{F}</tool_call>{CALL}", f"<tool_call>{SPACE}{F}</tool_call>", 1),
    (hermes, "<tool_call>", "", f"<tool_call>{SPACE}", 0),
    (hermes, "<tool_call>", CALL, f"<tool_call>{EXCESS}", 1),
    (hermes, f"<tool_call>{F}", "</tool_call>Hi" + CALL, "Hi", 2),
    (hermes, f"<tool_call>{F}", "", "", 1),
    (llama3, "", F, EXCESS, 1),
    (llama3, "", '{"city": "Rome"}', SPACE + '{"city": "Rome"}', 0),
    (llama3, "", "Hi", SPACE + "Hi", 0),
    (llama3, "", "", SPACE, 0),
    (llama3, "Hi", f"<|python_tag|>{F}", "Hi" + EXCESS, 1),
    (llama3, "<|python_tag|>", F, "", 1),
    (llama3, "<|python_tag|>", "print(1)", "print(1)", 0),
    (llama3, "<|python_tag|>", "", SPACE[-MAX_HELD_WHITESPACE:], 0),
    (llama3, F, f"; {F}", "", 2),
    (llama3, F + ";", "Hi", "Hi", 1),
    (MistralToolParser, "Hi", f"[TOOL_CALLS][{F}]", "Hi" + EXCESS, 1),
    (MistralToolParser, "[TOOL_CALLS]", f"[{F}]", "", 1),
    (MistralToolParser, "[TOOL_CALLS]", f"f[ARGS]{X}", "", 1),
    (MistralToolParser, "[TOOL_CALLS]", "", SPACE[-MAX_HELD_WHITESPACE:], 0),
    (MistralToolParser, "[TOOL_CALLS]f", f"{X}[TOOL_CALLS]f{X}", f"f{SPACE}{X}", 1),
    (MistralToolParser, "[TOOL_CALLS][", f"{F}]", "", 1),
    (MistralToolParser, f"[TOOL_CALLS][{F}", f", {F}]Hi", "Hi", 2),
    (pythonic, "", "[f(x=1)]", EXCESS, 1),
    (pythonic, "", "Hi", SPACE + "Hi", 0),
    (pythonic, "Hi", "[f(x=1)]", f"Hi{SPACE}[f(x=1)]", 0),
    (pythonic, "[", "f(x=1)]", f"[{SPACE}f(x=1)]", 0),
    (pythonic, "[f", "(x=1)]", f"[f{SPACE}(x=1)]", 0),
    (pythonic, "[f(x=1)", ", f(x=1)]", "", 2),
    (pythonic, "[f(x=1)]", "Hi", "Hi", 1),
]


@pytest.mark.parametrize(("make", "before", "after", "text", "num_calls"), CASES)
def test_tool_call_parsers_hold_bounded_white_space(
    make: Callable[[], ToolCallParser], before: str, after: str, text: str, num_calls: int
) -> None:
    parser = make()
    pieces = parser.push(before)
    for _ in range(NUM_TOKENS):
        pieces += parser.push(TOKEN)
        assert len(parser._held_text) <= MAX_HELD
    pieces += parser.push(after) + parser.flush()
    assert read(pieces) == (text, [X] * num_calls)
    whole = make()
    assert read(whole.push(before + SPACE + after) + whole.flush()) == (text, [X] * num_calls)


def test_any_number_of_braces_after_a_hermes_call_is_dropped() -> None:
    parser = hermes()
    pieces = parser.push(f"<tool_call>{F}")
    for _ in range(NUM_TOKENS):
        assert parser.push("}\n}") == []
        assert parser._held_text == ""
    pieces += parser.push(f"</tool_call>{CALL}") + parser.flush()
    assert read(pieces) == ("", [X, X])


@pytest.mark.parametrize(
    ("inside", "before", "after", "reasoning", "text"),
    [
        (False, "", "Hi", "", SPACE + "Hi"),
        (False, "", "<think>Hi", "", SPACE + "<think>Hi"),
        (False, "", "", "", SPACE),
        (False, "<think>", "Hm.</think>Hi", "Hm.", "Hi"),
        (True, "", "Hm.</think>Hi", "Hm.", "Hi"),
        (True, "", "<think>Hm.</think>Hi", "Hm.", "Hi"),
        (True, "", "", "", ""),
        (True, "Hm.", "</think>Hi", "Hm." + EXCESS, "Hi"),
        (True, "Hm.", "So.</think>Hi", f"Hm.{SPACE}So.", "Hi"),
        (True, "Hm.", "", "Hm." + EXCESS, ""),
        (True, "Hm.</think>", "Hi", "Hm.", "Hi"),
        (True, "Hm.</think>Hi", "", "Hm.", "Hi" + SPACE),
    ],
)
def test_reasoning_parser_holds_bounded_white_space(
    inside: bool, before: str, after: str, reasoning: str, text: str
) -> None:
    def split(pieces: list[OutputPart]) -> tuple[str, str]:
        return (
            "".join(piece.text for piece in pieces if isinstance(piece, ReasoningPart)),
            "".join(piece.text for piece in pieces if isinstance(piece, TextPart)),
        )

    parser = ReasoningParser(in_reasoning=inside)
    pieces = parser.push(before)
    for _ in range(NUM_TOKENS):
        pieces += parser.push(TOKEN)
        assert len(parser._held) <= MAX_HELD_WHITESPACE
    assert split(pieces + parser.push(after) + parser.flush()) == (reasoning, text)
    whole = ReasoningParser(in_reasoning=inside)
    assert split(whole.push(before + SPACE + after) + whole.flush()) == (reasoning, text)


def test_call_after_reasoning_and_much_white_space_is_parsed() -> None:
    parser = OutputParser(ReasoningParser(in_reasoning=True), hermes())
    pieces = parser.push(f"Hm.{SPACE}</think>{SPACE}Hi{SPACE}{CALL}") + parser.flush()
    assert pieces == [
        ReasoningPart("Hm." + EXCESS), TextPart("Hi" + EXCESS), ToolCallStart(0, "f"),
        ToolCallArguments(0, X),
    ]  # fmt: skip


LONGEST = " " * MAX_HELD_WHITESPACE


@pytest.mark.parametrize(
    ("make", "answer", "text", "too_long_text", "too_long_calls"),
    [
        (hermes, f"Hi{{}}{CALL}", "Hi", "Hi ", 1),
        (hermes, f"<tool_call>{{}}{F}</tool_call>", "", f"<tool_call>{LONGEST} {F}</tool_call>", 0),
        (llama3, "{}" + F, "", " ", 1),
        (pythonic, "{}[f(x=1)]", "", " ", 1),
        (pythonic, "[{}f(x=1)]", "", f"[{LONGEST} f(x=1)]", 0),
        (pythonic, "[f{}(x=1)]", "", f"[f{LONGEST} (x=1)]", 0),
    ],
)
def test_white_space_up_to_the_bound_belongs_to_a_call(
    make: Callable[[], ToolCallParser],
    answer: str,
    text: str,
    too_long_text: str,
    too_long_calls: int,
) -> None:
    def parse(space: str) -> tuple[str, list[str]]:
        parser = make()
        return read(parser.push(answer.replace("{}", space, 1)) + parser.flush())

    assert parse(LONGEST) == (text, [X])
    assert parse(LONGEST + " ") == (too_long_text, [X] * too_long_calls)


def test_reasoning_begins_after_white_space_up_to_the_bound() -> None:
    for space, parts in (
        (LONGEST, [ReasoningPart("Hm."), TextPart("Hi")]),
        (LONGEST + " ", [TextPart(f"{LONGEST} <think>Hm.</think>Hi")]),
    ):
        parser = ReasoningParser(in_reasoning=False)
        assert parser.push(f"{space}<think>Hm.</think>Hi") + parser.flush() == parts
