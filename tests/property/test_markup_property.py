"""Tests the parsers of tool calls and reasoning with random model outputs that are split
anywhere."""

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

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

NAMES = ("f", "get-weather", "a.b_c")
SCHEMAS: dict[str, dict[str, Any]] = {name: {} for name in NAMES}

FAMILIES = ("hermes", "llama3", "tagged", "mistral_v3", "mistral", "pythonic")
"""The families whose calls :func:`render` writes; ``tagged`` is Llama 3 with its special token."""


def parser_of(family: str, reasoning: str = "", *, inside: bool = False) -> OutputParser:
    tools = TOOL_PARSERS["llama3" if family == "tagged" else family]
    thinks = next((each for each in REASONING_FORMATS if each.name == reasoning), None)
    return OutputParser(thinks, tools, SCHEMAS, in_reasoning=inside and thinks is not None)


FRAGMENTS = [
    "<tool_call>", "</tool_call>", "<tool_", "<function=f>", "<parameter=x>", "</parameter>",
    "</function>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[", "]", "<think>", "</think>",
    "[f(", "x=", ")", "'",
    '{"name": "f", "arguments": {"x": 1}}', '{"name": "f", "parameters": ', '{"', '"name"', ": ",
    '"f"', ", ", "{}", "{", "}", '"', "\\", "; ", "\n", " ", "ö", "text", "null", "12",
]  # fmt: skip

texts = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=4), max_size=12).map("".join)
long_spaces = st.sampled_from(
    [" " * length for length in (1, MAX_HELD_WHITESPACE, MAX_HELD_WHITESPACE + 1)]
)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)
calls = st.lists(
    st.tuples(st.sampled_from(NAMES), st.dictionaries(st.text(max_size=4), values, max_size=3)),
    min_size=1,
    max_size=3,
)


def join(parts: list[OutputPart]) -> tuple[str, str, list[tuple[str, str]]]:
    """Join the parts of an output. Return its reasoning, its text, and its tool calls, each of
    which is a pair (name, arguments)."""
    tool_calls: list[tuple[str, str]] = []
    for part in parts:
        if isinstance(part, ToolCallStart):
            tool_calls.append((part.name, ""))
        elif isinstance(part, ToolCallArguments):
            tool_calls[-1] = (tool_calls[-1][0], tool_calls[-1][1] + part.arguments)
    reasoning = "".join(part.text for part in parts if isinstance(part, ReasoningPart))
    text = "".join(part.text for part in parts if isinstance(part, TextPart))
    return reasoning, text, tool_calls


def parse(parser: OutputParser, pieces: list[str]) -> tuple[str, str, list[tuple[str, str]]]:
    parts = [part for piece in pieces for part in parser.push(piece)]
    return join(parts + parser.flush())


def split(text: str, cuts: list[int]) -> list[str]:
    ends = sorted({min(cut, len(text)) for cut in cuts} | {len(text)})
    return [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]


MARKS = sorted(
    {string for each in (*TOOL_PARSERS.values(), *REASONING_FORMATS) for string in each.special}
)
MARKED = st.lists(
    st.sampled_from(FRAGMENTS) | st.sampled_from(MARKS) | st.text(max_size=4), max_size=12
).map("".join)


@given(
    st.sampled_from(sorted(TOOL_PARSERS)),
    st.sampled_from(["", *(each.name for each in REASONING_FORMATS)]),
    st.booleans(),
    MARKED,
    st.lists(st.integers(0, 120), max_size=20),
)
def test_splitting_an_output_does_not_change_the_result(
    family: str, reasoning: str, inside: bool, text: str, cuts: list[int]
) -> None:
    def parser() -> OutputParser:
        return parser_of(family, reasoning, inside=inside)

    whole = parse(parser(), [text])
    assert parse(parser(), split(text, cuts)) == whole
    assert parse(parser(), list(text)) == whole


@given(
    st.sampled_from(sorted(TOOL_PARSERS)),
    st.sampled_from(["", *(each.name for each in REASONING_FORMATS)]),
    st.booleans(),
    st.lists(st.sampled_from(FRAGMENTS) | long_spaces, max_size=12).map("".join),
    st.lists(st.integers(0, 4 * MAX_HELD_WHITESPACE), max_size=20),
)
def test_splitting_an_output_with_much_white_space_does_not_change_the_result(
    family: str, reasoning: str, inside: bool, text: str, cuts: list[int]
) -> None:
    def parser() -> OutputParser:
        return parser_of(family, reasoning, inside=inside)

    assert parse(parser(), split(text, cuts)) == parse(parser(), [text])


@given(texts)
def test_an_output_without_markup_is_text(text: str) -> None:
    if "<tool_call>" not in text:
        assert parse(parser_of("hermes"), [text]) == ("", text, [])


def render(family: str, tool_calls: list[tuple[str, dict[str, Any]]], indent: int | None) -> str:
    """Write tool calls in the markup of the model family ``family``."""
    key = "parameters" if family in ("llama3", "tagged") else "arguments"
    objects = [
        json.dumps({"name": name, key: arguments}, ensure_ascii=False, indent=indent)
        for name, arguments in tool_calls
    ]
    match family:
        case "hermes":
            return "\n".join(f"<tool_call>\n{each}\n</tool_call>" for each in objects)
        case "llama3":
            return "; ".join(objects)
        case "tagged":
            return "<|python_tag|>" + "; ".join(objects)
        case "mistral_v3":
            return "[TOOL_CALLS] [" + ", ".join(objects) + "]"
        case "pythonic":
            rendered = (f"{name}(x={arguments!r})" for name, arguments in tool_calls)
            return "[" + ", ".join(rendered) + "]"
        case _:
            return "".join(
                f"[TOOL_CALLS]{name}[ARGS]{json.dumps(arguments, indent=indent)}"
                for name, arguments in tool_calls
            )


@given(
    st.sampled_from(FAMILIES),
    calls,
    st.sampled_from([None, 2]),
    st.lists(st.integers(0, 300), max_size=20),
)
def test_tool_calls_are_parsed_as_they_were_written(
    family: str, expected: list[tuple[str, dict[str, Any]]], indent: int | None, cuts: list[int]
) -> None:
    pieces = split(render(family, expected, indent), cuts)
    reasoning, text, parsed = parse(parser_of(family), pieces)
    assert reasoning == text == ""
    if family == "pythonic":
        expected = [(name, {"x": arguments}) for name, arguments in expected]
    assert [(name, json.loads(arguments)) for name, arguments in parsed] == expected


@given(
    st.lists(
        st.tuples(
            st.sampled_from(NAMES),
            st.dictionaries(
                st.from_regex(r"[a-z_]{1,6}", fullmatch=True),
                st.text(max_size=12).filter(lambda text: "<" not in text),
                max_size=3,
            ),
        ),
        min_size=1,
        max_size=3,
    )
)
def test_tool_calls_in_xml_are_parsed(expected: list[tuple[str, dict[str, str]]]) -> None:
    text = "\n".join(
        f"<tool_call>\n<function={name}>\n"
        + "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
        + "</function>\n</tool_call>"
        for name, values in expected
    )
    _, text, parsed = parse(parser_of("qwen3_xml"), [text])
    assert text == ""
    assert [(name, json.loads(arguments)) for name, arguments in parsed] == expected
