"""Calls and thoughts, whatever a model says and however it is split."""

import json
from collections.abc import Callable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

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

NAMES = ("f", "get-weather", "a.b_c")
SCHEMAS: dict[str, dict[str, Any]] = {name: {} for name in NAMES}

PARSERS: dict[str, Callable[[], ToolCallParser]] = {
    "hermes": lambda: HermesToolParser(SCHEMAS),
    "coder": lambda: HermesToolParser(SCHEMAS),
    "llama3": lambda: Llama3ToolParser(frozenset(NAMES)),
    "tagged": lambda: Llama3ToolParser(frozenset(NAMES)),
    "mistral": MistralToolParser,
    "mistral_named": MistralToolParser,
    "pythonic": lambda: PythonicToolParser(frozenset(NAMES)),
}

FRAGMENTS = [
    "<tool_call>", "</tool_call>", "<tool_", "<function=f>", "<parameter=x>", "</parameter>",
    "</function>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[", "]", "<think>", "</think>",
    "[f(", "x=", ")", "'",
    '{"name": "f", "arguments": {"x": 1}}', '{"name": "f", "parameters": ', '{"', '"name"', ": ",
    '"f"', ", ", "{}", "{", "}", '"', "\\", "; ", "\n", " ", "ö", "text", "null", "12",
]  # fmt: skip

texts = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=4), max_size=12).map("".join)
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


def told(pieces: list[OutputPart]) -> tuple[str, str, list[tuple[str, str]]]:
    made: list[tuple[str, str]] = []
    for piece in pieces:
        if isinstance(piece, ToolCallStart):
            made.append((piece.name, ""))
        elif isinstance(piece, ToolCallArguments):
            made[-1] = (made[-1][0], made[-1][1] + piece.arguments)
    thought = "".join(piece.text for piece in pieces if isinstance(piece, ReasoningPart))
    return thought, "".join(piece.text for piece in pieces if isinstance(piece, TextPart)), made


def read(reader: OutputParser, parts: list[str]) -> tuple[str, str, list[tuple[str, str]]]:
    pieces = [piece for part in parts for piece in reader.push(part)]
    return told(pieces + reader.flush())


def split(text: str, cuts: list[int]) -> list[str]:
    ends = sorted({min(cut, len(text)) for cut in cuts} | {len(text)})
    return [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]


@given(
    st.sampled_from(sorted(PARSERS)),
    st.sampled_from([None, False, True]),
    texts,
    st.lists(st.integers(0, 120), max_size=20),
)
def test_splitting_changes_nothing(
    family: str, inside: bool | None, text: str, cuts: list[int]
) -> None:
    def reader() -> OutputParser:
        thinking = None if inside is None else ReasoningParser(inside=inside)
        return OutputParser(thinking, PARSERS[family]())

    whole = read(reader(), [text])
    assert read(reader(), split(text, cuts)) == whole
    assert read(reader(), list(text)) == whole


@given(texts)
def test_what_has_no_marks_is_text(text: str) -> None:
    if "<tool_call>" not in text:
        assert read(OutputParser(None, PARSERS["hermes"]()), [text]) == ("", text, [])


def written(family: str, made: list[tuple[str, dict[str, Any]]], indent: int | None) -> str:
    key = "parameters" if family in ("llama3", "tagged") else "arguments"
    objects = [
        json.dumps({"name": name, key: arguments}, ensure_ascii=False, indent=indent)
        for name, arguments in made
    ]
    match family:
        case "hermes":
            return "\n".join(f"<tool_call>\n{each}\n</tool_call>" for each in objects)
        case "llama3":
            return "; ".join(objects)
        case "tagged":
            return "<|python_tag|>" + "; ".join(objects)
        case "mistral":
            return "[TOOL_CALLS] [" + ", ".join(objects) + "]"
        case "pythonic":
            written = (f"{name}(x={arguments!r})" for name, arguments in made)
            return "[" + ", ".join(written) + "]"
        case _:
            return "".join(
                f"[TOOL_CALLS]{name}[ARGS]{json.dumps(arguments, indent=indent)}"
                for name, arguments in made
            )


@given(
    st.sampled_from(sorted(PARSERS.keys() - {"coder"})),
    calls,
    st.sampled_from([None, 2]),
    st.lists(st.integers(0, 300), max_size=20),
)
def test_calls_come_back_as_they_were_written(
    family: str, made: list[tuple[str, dict[str, Any]]], indent: int | None, cuts: list[int]
) -> None:
    parts = split(written(family, made, indent), cuts)
    thought, text, got = read(OutputParser(None, PARSERS[family]()), parts)
    assert thought == text == ""
    if family == "pythonic":
        made = [(name, {"x": arguments}) for name, arguments in made]
    assert [(name, json.loads(arguments)) for name, arguments in got] == made


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
def test_calls_in_xml(made: list[tuple[str, dict[str, str]]]) -> None:
    text = "\n".join(
        f"<tool_call>\n<function={name}>\n"
        + "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
        + "</function>\n</tool_call>"
        for name, values in made
    )
    _, text, got = read(OutputParser(None, PARSERS["coder"]()), [text])
    assert text == ""
    assert [(name, json.loads(arguments)) for name, arguments in got] == made
