"""Tests every format of tool calls with answers that are written by its row: reasoning, text, one
call, two calls, marks within arguments, and an answer that is cut off. Also tests how the JSON of
models is mended."""

import json
from collections.abc import Sequence

import pytest

from router.serving.parsers.model_json import JsonRepairer, typed_json
from router.serving.parsers.model_output_format import REASONING_PARSERS, TOOL_PARSERS
from router.serving.parsers.output_parser import OutputParser
from router.serving.parsers.output_parts import ReasoningPart, TextPart, ToolCallStart
from router.serving.parsers.writing import GemmaArguments, JsonArguments, KeyedArguments

Call = tuple[str, dict[str, str]]

SCHEMAS = {
    "f": {"properties": {"x": {"type": "string"}, "y": {"type": "string"}}},
    "g-h": {"properties": {"x": {"type": "string"}}},
}
ONE: list[Call] = [("f", {"x": "a b", "y": "ü"})]
TWO: list[Call] = [*ONE, ("g-h", {"x": ""})]


def write_arguments(form: str, values: dict[str, str]) -> str:
    match TOOL_PARSERS[form].writing.arguments:
        case KeyedArguments(head, tail, between, is_raw):
            filled = head.replace("{is_text}", "true").replace("{type}", "string")
            return between.join(
                filled.replace("{key}", key) + (value if is_raw else json.dumps(value)) + tail
                for key, value in values.items()
            )
        case GemmaArguments(quote):
            return "{" + ",".join(f"{k}:{quote}{v}{quote}" for k, v in values.items()) + "}"
        case JsonArguments():
            return json.dumps(values, ensure_ascii=False)
    raise AssertionError(form)


def write_calls(form: str, calls: Sequence[Call]) -> str:
    writing = TOOL_PARSERS[form].writing
    written = (
        writing.head.replace("{name}", name).replace("{number}", str(number))
        + write_arguments(form, values)
        + writing.tail
        for number, (name, values) in enumerate(calls)
    )
    between = "<|call|><|start|>assistant" if form == "harmony" else writing.between
    return writing.opening + between.join(written) + writing.closing


def read(form: str, reasoning: str, text: str) -> tuple[str, str, list[Call]]:
    """Parse an answer whole and a character at a time; return its reasoning, text and calls."""
    results = []
    for pieces in ([text], list(text)):
        parser = OutputParser(REASONING_PARSERS.get(reasoning), TOOL_PARSERS[form], SCHEMAS)
        parts = [part for piece in pieces for part in parser.push(piece)] + parser.flush()
        calls: dict[int, list[str]] = {}
        for part in parts:
            if isinstance(part, ToolCallStart):
                calls[part.index] = [part.name, ""]
            elif not isinstance(part, TextPart | ReasoningPart):
                calls[part.index][1] += part.arguments
        for index in parser.cut_calls:
            with pytest.raises(ValueError):
                json.loads(calls.pop(index)[1])
        results.append(
            (
                "".join(part.text for part in parts if isinstance(part, ReasoningPart)),
                "".join(part.text for part in parts if isinstance(part, TextPart)),
                [(name, json.loads(arguments)) for name, arguments in calls.values()],
            )
        )
    assert results[0] == results[1]
    return results[0]


ANNOUNCED = [name for name, each in TOOL_PARSERS.items() if each.unannounced is None]
OWN = {"harmony": "harmony", "kimi_k3": "kimi_k3"}
"""Formats whose text stands behind marks of their format of reasoning."""


@pytest.mark.parametrize("form", TOOL_PARSERS)
@pytest.mark.parametrize("calls", [ONE, TWO])
def test_calls_are_read_as_they_are_written(form: str, calls: list[Call]) -> None:
    assert read(form, OWN.get(form, ""), write_calls(form, calls)) == ("", "", calls)


@pytest.mark.parametrize("form", ANNOUNCED)
def test_reasoning_and_text_precede_calls(form: str) -> None:
    reasoning = REASONING_PARSERS[OWN.get(form, form if form in REASONING_PARSERS else "think")]
    before = f"{reasoning.opens}Hm.{reasoning.closes}"
    text = {
        "harmony": "<|channel|>commentary<|message|>Well.<|end|><|start|>assistant",
        "kimi_k3": "<|open|>response<|sep|>Well.<|close|>response<|sep|>",
        "command": "<|START_RESPONSE|>Well.<|END_RESPONSE|>",
    }.get(form, "Well.")
    written = before + text + write_calls(form, TWO)
    assert read(form, reasoning.name, written) == ("Hm.", "Well.", TWO)


@pytest.mark.parametrize("form", TOOL_PARSERS)
def test_marks_within_arguments_are_text(form: str) -> None:
    marks = " ".join(mark for mark in TOOL_PARSERS[form].special if mark != '<|"|>')
    calls = [("f", {"x": f"{marks} </think> </parameter> and </function>", "y": f"a {marks} b"})]
    assert read(form, OWN.get(form, ""), write_calls(form, calls)) == ("", "", calls)


@pytest.mark.parametrize("form", ANNOUNCED)
def test_calls_that_are_cut_off_are_not_whole(form: str) -> None:
    """Wherever the answer is cut, only the calls before it are whole."""
    written = write_calls(form, TWO)
    found = [read(form, OWN.get(form, ""), written[:end])[2] for end in range(len(written))]
    assert all(calls == TWO[: len(calls)] for calls in found)
    assert {len(calls) for calls in found} >= {0, 1}


@pytest.mark.parametrize(
    ("written", "mended"),
    [
        ('{"a": "x\ny\tz"}', '{"a": "x\\ny\\tz"}'),
        (r'{"re": "\d+\.\w"}', r'{"re": "\\d+\\.\\w"}'),
        (r'{"a": "it\'s \"ok\" \\ \/ \u00e9"}', r'{"a": "it' + r"'s" + r' \"ok\" \\ \/ \u00e9"}'),
        (r'{"a": "\u12"}', r'{"a": "\\u12"}'),
        (
            '{"a": True, "b": [None, False], "c": "True"}',
            '{"a": true, "b": [null, false], "c": "True"}',
        ),
        ('{"a": "\x00\x1f"}', '{"a": "\\u0000\\u001f"}'),
        (' {"a": [1, -2.5e3, {}]} and more', ' {"a": [1, -2.5e3, {}]}'),
    ],
)
def test_json_is_mended(written: str, mended: str) -> None:
    json.loads(mended)
    for pieces in ([written], list(written)):
        value = JsonRepairer()
        assert "".join(value.push(piece)[0] for piece in pieces) == mended
        assert value.is_done and not value.is_invalid


@pytest.mark.parametrize("written", ['{"a": 1]', '{"a": `1`}', "{'a': 1}", "[}"])
def test_json_that_can_not_be_mended_is_invalid(written: str) -> None:
    value = JsonRepairer()
    value.push(written)
    assert value.is_invalid


@pytest.mark.parametrize(
    ("text", "schema", "expected"),
    [
        ("5", {"type": "integer"}, "5"),
        ("5", {"type": ["integer", "null"]}, "5"),
        ("5", {"anyOf": [{"type": "integer"}, {"type": "null"}]}, "5"),
        ("5", {"type": ["string", "integer"]}, '"5"'),
        ("null", {"type": ["string", "null"]}, "null"),
        ("null", {"type": "string"}, '"null"'),
        ("True", {"type": "boolean"}, "true"),
        ("true", {"type": ["string", "boolean"]}, '"true"'),
        ('{"a": 1}', {"anyOf": [{"type": "string"}, {"type": "object"}]}, '{"a": 1}'),
        ("many", {"type": "integer"}, '"many"'),
        ("2", {"enum": [1, 2]}, "2"),
        ("x", {"enum": ["x", 1]}, '"x"'),
        ("[1]", {}, "[1]"),
        ("NaN", {"type": "number"}, '"NaN"'),
    ],
)
def test_values_have_the_types_of_their_schemas(text: str, schema: object, expected: str) -> None:
    assert typed_json(text, schema) == expected
