"""Tests how tool calls and reasoning are found in a model's text: each model family's markup, and
text that only resembles markup."""

import json
from collections.abc import Callable

import pytest

from router.serving.parsers.model_output_format import TOOL_PARSERS
from router.serving.parsers.output_parser import OutputParser
from router.serving.parsers.output_parts import (
    OutputPart,
    ReasoningPart,
    TextPart,
    ToolCallArguments,
    ToolCallStart,
)
from router.serving.parsers.reasoning_formats import REASONING_FORMATS

THINK = REASONING_FORMATS[-1]
SCHEMAS = {
    "f": {"properties": {"x": {"type": "integer"}, "b": {"type": "boolean"}, "s": {}}},
    "g": {},
}


def hermes() -> OutputParser:
    return OutputParser(None, TOOL_PARSERS["hermes"], SCHEMAS)


def llama3() -> OutputParser:
    return OutputParser(None, TOOL_PARSERS["llama3"], SCHEMAS)


def mistral() -> OutputParser:
    return OutputParser(None, TOOL_PARSERS["mistral"], SCHEMAS)


def pythonic() -> OutputParser:
    return OutputParser(None, TOOL_PARSERS["pythonic"], SCHEMAS)


TextAndCalls = tuple[str, list[tuple[str, str]]]
"""The text, and all tool calls as (name, arguments)."""


def text_and_calls(pieces: list[OutputPart]) -> TextAndCalls:
    calls: list[tuple[str, str]] = []
    for piece in pieces:
        match piece:
            case ToolCallStart(index, name):
                assert index == len(calls)
                calls.append((name, ""))
            case ToolCallArguments(index, arguments):
                assert index == len(calls) - 1 and arguments
                calls[-1] = (calls[-1][0], calls[-1][1] + arguments)
    return "".join(piece.text for piece in pieces if isinstance(piece, TextPart)), calls


def read(parser: OutputParser, text: str) -> TextAndCalls:
    return text_and_calls(parser.push(text) + parser.flush())


F = '{"name": "f", "arguments": {"x": 1}}'

CASES: list[tuple[Callable[[], OutputParser], str, str, list[tuple[str, str]]]] = [
    # -- Hermes: text, calls, and both; keys in any order; text after a call
    (hermes, "", "", []),
    (hermes, " just text \n", " just text \n", []),
    (hermes, f"<tool_call>\n{F}\n</tool_call>", "", [("f", '{"x": 1}')]),
    (hermes, f"Let me see.\n<tool_call>{F}</tool_call>\n", "Let me see.", [("f", '{"x": 1}')]),
    (
        hermes,
        '<tool_call>\n{"arguments": {}, "name": "g"}\n</tool_call>\n<tool_call>\n'
        + F + "\n</tool_call>\nDone. ",
        "Done. ",
        [("g", "{}"), ("f", '{"x": 1}')],
    ),
    (hermes, '<tool_call>{"name": "h"}</tool_call>', "", [("h", "{}")]),
    (hermes, '<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", "{}")]),
    (hermes, '<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}', "", [("f", '{"x": 1}')]),
    (hermes, '<tool_call>{"id": 7, "name": "f", "arguments": {}}', "", [("f", "{}")]),
    # An unpaired surrogate, which can't be sent to a client; as an escape it can
    (hermes, '<tool_call>{"name": "f", "arguments": "\\ud800"}', "", [("f", '"\\ud800"')]),
    (hermes, '<tool_call>{"name": "f", "arguments": "\\ud83d\\ude00"}', "", [("f", "😀")]),
    (hermes, '<tool_call>{"name": "\\udc00"}', '<tool_call>{"name": "\\udc00"}', []),
    (
        hermes,
        '<tool_call>{"name": "f", "arguments": {"s": "}</tool_call>\\"{"}}</tool_call>',
        "",
        [("f", '{"s": "}</tool_call>\\"{"}')],
    ),
    # A superfluous brace, and a missing end
    (hermes, '<tool_call>{"name": "f", "arguments": {}}}\n</tool_call>', "", [("f", "{}")]),
    (hermes, f"<tool_call>{F}", "", [("f", '{"x": 1}')]),
    (hermes, '<tool_call>{"name": "f", "arguments": {"x": ', "", [("f", '{"x": ')]),
    (hermes, '<tool_call>{"name": "f", "arguments": {"x": oops}}', "", [("f", '{"x": oops}')]),
    # Text that is no call
    (hermes, "a <tool_call> b", "a <tool_call> b", []),
    (hermes, "<tool_call", "<tool_call", []),
    # The answer ends where a call may have begun
    (hermes, "Hi <tool_call>", "Hi", []),
    (hermes, '<tool_call>\n{"name": "f", "arg', "", []),
    (hermes, '<tool_call>{"x": 1}</tool_call>', '<tool_call>{"x": 1}</tool_call>', []),
    (hermes, '<tool_call>{"name": 5, "x": {}}', '<tool_call>{"name": 5, "x": {}}', []),
    (hermes, "</tool_call>", "</tool_call>", []),
    # -- Qwen3-Coder
    (
        hermes,
        "<tool_call>\n<function=f>\n<parameter=x>\n12\n</parameter>\n<parameter=s>\na\n\nb\n"
        "</parameter>\n<parameter=b>\nTrue\n</parameter>\n</function>\n</tool_call>\nok",
        "ok",
        [("f", '{"x": 12, "s": "a\\n\\nb", "b": true}')],
    ),
    (hermes, "<tool_call><function=f></function></tool_call>", "", [("f", "{}")]),
    (
        hermes,
        "<tool_call><function=f><parameter=x>many</parameter></function>",
        "",
        [("f", '{"x": "many"}')],
    ),
    (
        hermes,
        '<tool_call><function=f><parameter=x>"\\ud800"</parameter></function>',
        "",
        [("f", '{"x": "\\"\\\\ud800\\""}')],
    ),
    (hermes, "<tool_call><function=></tool_call>.", "<tool_call><function=></tool_call>.", []),
    # -- Llama 3: one object, several, after its special token, and plain JSON as an answer
    (llama3, '{"name": "f", "parameters": {"x": 1}}', "", [("f", '{"x": 1}')]),
    (llama3, f"\n{F}", "", [("f", '{"x": 1}')]),
    (llama3, '{"type": "function", "name": "g", "parameters": {}}', "", [("g", "{}")]),
    (
        llama3,
        '{"name": "f", "parameters": {"x": 1}}; {"name": "g", "parameters": {}}',
        "",
        [("f", '{"x": 1}'), ("g", "{}")],
    ),
    (llama3, '<|python_tag|>{"name": "h", "parameters": {}}', "", [("h", "{}")]),
    (llama3, 'So: <|python_tag|>{"name": "h", "parameters": {}}', "So:", [("h", "{}")]),
    (llama3, "<|python_tag|>print(1)", "print(1)", []),
    (llama3, ' {"name": "h", "parameters": {}}', ' {"name": "h", "parameters": {}}', []),
    (llama3, '{"name": "f", "age": 5}', '{"name": "f", "age": 5}', []),
    (llama3, '{"name": "f"}', '{"name": "f"}', []),
    (llama3, '{"city": "Rome"}', '{"city": "Rome"}', []),
    (llama3, '{"name": "f", "parameters": {}} and more', "and more", [("f", "{}")]),
    (llama3, "Hello {there}", "Hello {there}", []),
    # -- Mistral
    (
        mistral,
        '[TOOL_CALLS] [{"name": "f", "arguments": {"x": [1]}}, {"name": "g", "arguments": {}}]',
        "",
        [("f", '{"x": [1]}'), ("g", "{}")],
    ),
    (mistral, '[TOOL_CALLS]f[ARGS]{"x": 1}', "", [("f", '{"x": 1}')]),
    (
        mistral,
        'Hm.[TOOL_CALLS]f[CALL_ID]a1[ARGS]{"x": {}}[TOOL_CALLS]g{}',
        "Hm.",
        [("f", '{"x": {}}'), ("g", "{}")],
    ),
    (mistral, "[TOOL_CALLS] never mind", " never mind", []),
    (mistral, "[TOOL", "[TOOL", []),
    # -- Pythonic: a list as the whole answer, with Python and JSON values
    (pythonic, "[f(x=1)]", "", [("f", '{"x": 1}')]),
    (
        pythonic,
        """\n[f(x=-1.5, s='a"]) ö', b=[True, None, (1,)]), g(s={"k": false})]\n""",
        "",
        [
            ("f", '{"x": -1.5, "s": "a\\"]) ö", "b": [true, null, [1]]}'),
            ("g", '{"s": {"k": false}}'),
        ],
    ),
    (pythonic, '[f(s="\\ud83d\\ude00\\n")]', "", [("f", '{"s": "😀\\n"}')]),
    (pythonic, "[g( ) , f ( x = 2 ) ] and more", "and more", [("g", "{}"), ("f", '{"x": 2}')]),
    (pythonic, "[g()", "", [("g", "{}")]),
    (pythonic, "[g(), f(x=", "", [("g", "{}")]),
    (pythonic, "[g(), f(x=y)] z", "f(x=y)] z", [("g", "{}")]),
    (pythonic, "[h(x=1)]", "[h(x=1)]", []),
    (pythonic, "[f(1)]", "[f(1)]", []),
    (pythonic, "[f(x=1, x=2)]", "[f(x=1, x=2)]", []),
    (pythonic, "[f(x=open('a'))]", "[f(x=open('a'))]", []),
    (pythonic, "[f(**{})]", "[f(**{})]", []),
    (pythonic, "[f(x=1e999)]", "[f(x=1e999)]", []),
    (pythonic, '[f(s="\\ud83d")]', '[f(s="\\ud83d")]', []),
    (pythonic, "[1, 2]", "[1, 2]", []),
    (pythonic, "[f", "[f", []),
    (pythonic, " f(x=1)", " f(x=1)", []),
    (pythonic, "Say [f(x=1)]", "Say [f(x=1)]", []),
    (pythonic, "[f(x=" + "(" * 70 + ")" * 70 + ")]", "[f(x=" + "(" * 70 + ")" * 70 + ")]", []),
]  # fmt: skip


@pytest.mark.parametrize(("make", "text", "content", "calls"), CASES)
def test_tool_calls_are_parsed(
    make: Callable[[], OutputParser], text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    assert read(make(), text) == (content, calls)


@pytest.mark.parametrize(("make", "text", "content", "calls"), CASES)
def test_tool_calls_are_parsed_in_pieces_of_any_size(
    make: Callable[[], OutputParser], text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    whole = read(make(), text)
    for size in (1, 2, 3, 5, 8):
        parser = make()
        pieces: list[OutputPart] = []
        for start in range(0, len(text), size):
            pieces += parser.push(text[start : start + size])
        assert text_and_calls(pieces + parser.flush()) == whole, size


def test_tool_call_is_streamed_as_it_arrives() -> None:
    parser = hermes()
    parts = ["Hi", " <", "b>", "\n<tool_", 'call>{"name": "f", "argu', 'ments": ', '{"x"', ": 1}}"]
    assert [parser.push(part) for part in parts] == [
        [TextPart("Hi")],
        [],
        [TextPart(" <b>")],
        [],
        [],
        [],
        [ToolCallStart(0, "f"), ToolCallArguments(0, '{"x"')],
        [ToolCallArguments(0, ": 1}")],
    ]
    assert parser.push("\n</tool_call>") == parser.flush() == []


def test_plain_json_answer_is_not_held_back() -> None:
    parser = llama3()
    assert parser.push('{"city') == []
    assert parser.push('":') == [TextPart('{"city":')]
    assert parser.push(' "Ro') == [TextPart(' "Ro')]


def test_held_back_text_is_bounded() -> None:
    parser = hermes()
    pieces = parser.push('<tool_call>{"arguments": {"x": "' + "y" * 70_000)
    assert len(text_and_calls(pieces)[0]) == 70_000 + len('<tool_call>{"arguments": {"x": "')
    pieces = hermes().push("<tool_call><function=f>" + "y" * 70_000)
    assert len(text_and_calls(pieces)[0]) > 70_000


def test_deeply_nested_arguments_are_no_error() -> None:
    deep = "[" * 30_000 + "]" * 30_000
    text = f'<tool_call>{{"arguments": {deep}, "name": "f"}}</tool_call>'
    assert read(hermes(), text) == ("", [("f", deep)])
    xml = f"<tool_call><function=f><parameter=x>{deep}</parameter></function></tool_call>"
    assert read(hermes(), xml) == ("", [("f", json.dumps({"x": deep}))])


def test_many_unclosed_tags_take_linear_time() -> None:
    """If names of parameters could contain any character, the parser would scan from each tag to
    the end of the text."""
    opened = "<parameter=" * 5900
    text = f"<tool_call><function=f>{opened}</function></tool_call>"
    assert read(hermes(), text) == (text, [])


def test_long_arguments_are_parsed() -> None:
    arguments = json.dumps({"text": "y" * 200_000})
    text = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
    assert read(hermes(), text) == ("", [("f", arguments)])


# -- reasoning ------------------------------------------------------------------------------------


def split_reasoning(inside: bool, text: str, size: int) -> tuple[str, str]:
    thinking = OutputParser(THINK, None, {}, in_reasoning=inside)
    pieces: list[OutputPart] = []
    for start in range(0, len(text), size):
        pieces += thinking.push(text[start : start + size])
    pieces += thinking.flush()
    return (
        "".join(piece.text for piece in pieces if isinstance(piece, ReasoningPart)),
        "".join(piece.text for piece in pieces if isinstance(piece, TextPart)),
    )


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize(
    ("inside", "text", "thought", "answer"),
    [
        (False, "", "", ""),
        (False, "plain <think>", "", "plain <think>"),
        (False, "<think>\nHm. \n\nSo.\n</think>\n\nYes </think>", "Hm. \n\nSo.", "Yes </think>"),
        (False, "\n<think></think>Yes", "", "Yes"),
        (False, " <thin", "", " <thin"),
        (True, "Hm.</think>\nYes", "Hm.", "Yes"),
        (True, "<think>Hm.</think>\nYes", "Hm.", "Yes"),
        (True, "Hm. </thi", "Hm. </thi", ""),
        (True, "\nHm.\n", "Hm.", ""),
        (True, "</think>\n\n", "", ""),
    ],
)
def test_reasoning_is_separated_from_the_answer(
    inside: bool, text: str, thought: str, answer: str, size: int
) -> None:
    assert split_reasoning(inside, text, size) == (thought, answer)


def test_reasoning_before_tool_calls() -> None:
    reader = OutputParser(THINK, TOOL_PARSERS["hermes"], SCHEMAS)
    pieces = reader.push(f"<think>call {F}</think>\n<tool_call>{F}</tool_call>")
    assert reader.is_in_reasoning is False and reader.has_tool_calls
    assert [piece for piece in pieces if isinstance(piece, ReasoningPart)] == [
        ReasoningPart(f"call {F}")
    ]
    assert text_and_calls(pieces + reader.flush()) == ("", [("f", '{"x": 1}')])


def test_parsing_stops_after_max_calls() -> None:
    reader = OutputParser(None, TOOL_PARSERS["hermes"], SCHEMAS, max_calls=1)
    pieces = reader.push(f"<tool_call>{F}</tool_call>\n<tool_call>\n")
    assert not reader.has_enough_calls
    pieces += reader.push(f"{F}</tool_call>")
    assert reader.has_enough_calls
    assert text_and_calls(pieces) == ("", [("f", '{"x": 1}')])


def read_reasoning(pieces: list[str]) -> tuple[str, TextAndCalls]:
    reader = OutputParser(THINK, TOOL_PARSERS["hermes"], SCHEMAS, in_reasoning=True)
    parts = [part for piece in pieces for part in reader.push(piece)] + reader.flush()
    thought = "".join(part.text for part in parts if isinstance(part, ReasoningPart))
    return thought, text_and_calls(parts)


def test_call_within_reasoning_counts_if_the_reasoning_is_never_closed() -> None:
    call, long = f"<tool_call>{F}</tool_call>", "hm " * 30_000
    called = [("f", '{"x": 1}')]
    for text, expected in (
        (f"Hm.\n{call}", ("Hm.", ("", called))),
        (f"Hm.\n{call} No.</think>Yes", (f"Hm.\n{call} No.", ("Yes", []))),
        (f"Hm.{call} No.</think>{call}", (f"Hm.{call} No.", ("", called))),
        (f"{call}{long}", ((call + long).rstrip(), ("", []))),
    ):
        assert read_reasoning([text]) == expected
        assert read_reasoning(list(text)) == expected
