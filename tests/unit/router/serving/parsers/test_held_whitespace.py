"""Tests how much white space the parsers of tool calls and reasoning hold back: 10,000 tokens of it
arrive in each of their states."""

import pytest

from router.serving.parsers.answer_tape import MAX_HELD_CHARACTERS
from router.serving.parsers.model_output_format import TOOL_PARSERS
from router.serving.parsers.output_parser import MAX_HELD_WHITESPACE, OutputParser
from router.serving.parsers.output_parts import (
    OutputPart,
    ReasoningPart,
    TextPart,
    ToolCallArguments,
    ToolCallStart,
)
from router.serving.parsers.reasoning_formats import REASONING_FORMATS

TOKEN = " \n\t " * 32
NUM_TOKENS = 10_000
SPACE = TOKEN * NUM_TOKENS
EXCESS = SPACE[:-MAX_HELD_WHITESPACE]
"""The part of SPACE that is text before a call. The rest belongs to the call's markup."""
MAX_HELD = MAX_HELD_CHARACTERS + len(TOKEN)
THINK = REASONING_FORMATS[-1]

F = '{"name": "f", "arguments": {"x": 1}}'
CALL = f"<tool_call>{F}</tool_call>"


def parser_of(name: str) -> OutputParser:
    return OutputParser(None, TOOL_PARSERS[name], {"f": {}})


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

CASES: list[tuple[str, str, str, str, int]] = [
    # the parser, the answer before and after the white space, its text, the number of its calls
    ("hermes", "", CALL, EXCESS, 1),
    ("hermes", "Hi", CALL, "Hi" + EXCESS, 1),
    ("hermes", "Hi", "there", f"Hi{SPACE}there", 0),
    ("hermes", "Hi", "", f"Hi{SPACE}", 0),
    ("hermes", CALL, CALL, "", 2),
    ("hermes", CALL, "", "", 1),
    ("hermes", CALL, "Hi", "Hi", 1),
    ("hermes", "<tool_call>", f"{F}</tool_call>{CALL}", f"<tool_call>{SPACE}{F}</tool_call>", 1),
    ("hermes", "<tool_call>", "", f"<tool_call>{SPACE}", 0),
    ("hermes", "<tool_call>", CALL, f"<tool_call>{EXCESS}", 1),
    ("hermes", f"<tool_call>{F}", "</tool_call>Hi" + CALL, "Hi", 2),
    ("hermes", f"<tool_call>{F}", "", "", 1),
    ("llama3", "", F, SPACE + F, 0),
    ("llama3", "", '{"city": "Rome"}', SPACE + '{"city": "Rome"}', 0),
    ("llama3", "", "Hi", SPACE + "Hi", 0),
    ("llama3", "", "", SPACE, 0),
    ("llama3", "Hi", f"<|python_tag|>{F}", "Hi" + EXCESS, 1),
    ("llama3", "<|python_tag|>", F, SPACE + F, 0),
    ("llama3", "<|python_tag|>", "print(1)", SPACE + "print(1)", 0),
    ("llama3", "<|python_tag|>", "", SPACE, 0),
    ("llama3", F, f"; {F}", "", 2),
    ("llama3", F + ";", "Hi", "Hi", 1),
    ("mistral", "Hi", f"[TOOL_CALLS][{F}]", "Hi" + EXCESS, 1),
    ("mistral", "[TOOL_CALLS]", f"[{F}]", f"{SPACE}[{F}]", 0),
    ("mistral", "[TOOL_CALLS]", f"f[ARGS]{X}", f"{SPACE}f[ARGS]{X}", 0),
    ("mistral", "[TOOL_CALLS]", "", SPACE, 0),
    ("mistral", "[TOOL_CALLS]f", f"{X}[TOOL_CALLS]f{X}", f"f{SPACE}{X}", 1),
    ("mistral", "[TOOL_CALLS][", f"{F}]", f"[{SPACE}{F}]", 0),
    ("mistral", f"[TOOL_CALLS][{F}", f", {F}]Hi", "Hi", 2),
    ("pythonic", "", "[f(x=1)]", SPACE + "[f(x=1)]", 0),
    ("pythonic", "", "Hi", SPACE + "Hi", 0),
    ("pythonic", "Hi", "[f(x=1)]", f"Hi{SPACE}[f(x=1)]", 0),
    ("pythonic", "[", "f(x=1)]", f"[{SPACE}f(x=1)]", 0),
    ("pythonic", "[f", "(x=1)]", f"[f{SPACE}(x=1)]", 0),
    ("pythonic", "[f(x=1)", ", f(x=1)]", "", 2),
    ("pythonic", "[f(x=1)]", "Hi", "Hi", 1),
]


@pytest.mark.parametrize(("name", "before", "after", "text", "num_calls"), CASES)
def test_bounded_white_space_is_held(
    name: str, before: str, after: str, text: str, num_calls: int
) -> None:
    parser = parser_of(name)
    pieces = parser.push(before)
    for _ in range(NUM_TOKENS):
        pieces += parser.push(TOKEN)
        assert held_size(parser) <= MAX_HELD
    pieces += parser.push(after) + parser.flush()
    assert read(pieces) == (text, [X] * num_calls)
    whole = parser_of(name)
    assert read(whole.push(before + SPACE + after) + whole.flush()) == (text, [X] * num_calls)


def held_size(parser: OutputParser) -> int:
    tape = parser._tape
    return tape.size + len(parser._whitespace) + tape.taken_size


def test_any_number_of_braces_after_a_hermes_call_is_dropped() -> None:
    parser = parser_of("hermes")
    pieces = parser.push(f"<tool_call>{F}")
    for _ in range(NUM_TOKENS):
        assert parser.push("}\n}") == []
        assert held_size(parser) == 0
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

    parser = OutputParser(THINK, None, {}, in_reasoning=inside)
    pieces = parser.push(before)
    for _ in range(NUM_TOKENS):
        pieces += parser.push(TOKEN)
        assert held_size(parser) <= MAX_HELD_WHITESPACE
    assert split(pieces + parser.push(after) + parser.flush()) == (reasoning, text)
    whole = OutputParser(THINK, None, {}, in_reasoning=inside)
    assert split(whole.push(before + SPACE + after) + whole.flush()) == (reasoning, text)


def test_call_after_reasoning_and_much_white_space_is_parsed() -> None:
    parser = OutputParser(THINK, TOOL_PARSERS["hermes"], {"f": {}}, in_reasoning=True)
    pieces = parser.push(f"Hm.{SPACE}</think>{SPACE}Hi{SPACE}{CALL}") + parser.flush()
    assert pieces == [
        ReasoningPart("Hm." + EXCESS), TextPart("Hi" + EXCESS), ToolCallStart(0, "f"),
        ToolCallArguments(0, X),
    ]  # fmt: skip


LONGEST = " " * MAX_HELD_WHITESPACE


def test_white_space_up_to_the_bound_belongs_to_a_call() -> None:
    for space, text in ((LONGEST, "Hi"), (LONGEST + " ", "Hi ")):
        parser = parser_of("hermes")
        assert read(parser.push(f"Hi{space}{CALL}") + parser.flush()) == (text, [X])


def test_white_space_around_calls_is_kept_between_texts() -> None:
    parser = parser_of("hermes")
    assert read(parser.push(f"So: {CALL}\nDone. ") + parser.flush()) == ("So: \nDone. ", [X])


def test_reasoning_begins_after_white_space_up_to_the_bound() -> None:
    longest = " " * 64
    for space, parts in (
        (longest, [ReasoningPart("Hm."), TextPart("Hi")]),
        (longest + " ", [TextPart(f"{longest} <think>Hm.</think>Hi")]),
    ):
        parser = OutputParser(THINK, None, {})
        assert parser.push(f"{space}<think>Hm.</think>Hi") + parser.flush() == parts
