"""Tests how the parts of an answer are collected until it is sent as a whole."""

import tracemalloc
from array import array
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.ids import TokenId
from baton.core.request import TokenLogprob
from router.serving.choice_result import PIECES_PER_RUN, ChoiceResult, TextBuffer
from router.serving.choice_stream import ChoiceDelta, TokenEntry
from router.serving.parsers.output_parts import (
    OutputPart,
    ReasoningPart,
    TextPart,
    ToolCallArguments,
    ToolCallStart,
)

ENTRY = TokenEntry(TokenLogprob(TokenId(7), -0.5, ()), 0)


def collected(*deltas: tuple[OutputPart, ...], has_logprobs: bool = False) -> ChoiceResult:
    answer = ChoiceResult(0, ())
    entries = (ENTRY,) if has_logprobs else ()
    for parts in deltas:
        answer.add(ChoiceDelta(0, "", (TokenId(7),), entries, None, parts))
    return answer


@pytest.mark.parametrize("num_pieces", [0, 1, PIECES_PER_RUN, 3 * PIECES_PER_RUN + 1])
def test_a_text_buffer_has_the_text_of_all_pieces(num_pieces: int) -> None:
    buffer, pieces = TextBuffer(), [f"{index} " for index in range(num_pieces)]
    for piece in pieces:
        buffer.append(piece)
        buffer.append("")
    assert buffer.text == "".join(pieces)
    assert bool(buffer) == (num_pieces > 0)
    assert buffer.take() == "".join(pieces)
    assert (buffer.text, bool(buffer)) == ("", False)


def test_parts_that_continue_each_other_are_joined() -> None:
    answer = collected(
        (ReasoningPart("a"),),
        (ReasoningPart("b"), TextPart("c")),
        (TextPart("d"), ToolCallStart(0, "f"), ToolCallArguments(0, "{")),
        (ToolCallArguments(0, "}"), ToolCallStart(1, "g"), ToolCallArguments(1, "[]")),
        (TextPart("e"),),
    )
    assert list(answer.parts) == [
        ReasoningPart("ab"),
        TextPart("cd"),
        ToolCallStart(0, "f"),
        ToolCallArguments(0, "{}"),
        ToolCallStart(1, "g"),
        ToolCallArguments(1, "[]"),
        TextPart("e"),
    ]
    assert (answer.text, answer.reasoning) == ("cde", "ab")
    assert answer.tool_calls == [(ToolCallStart(0, "f"), "{}"), (ToolCallStart(1, "g"), "[]")]
    assert answer.token_ids == array("q", [7] * 5)


def test_parts_can_be_added_after_they_have_been_read() -> None:
    answer = collected((TextPart("a"),), (TextPart("b"),))
    assert list(answer.parts) == [TextPart("ab")]
    answer.add(ChoiceDelta(0, "", (), (), "stop", (TextPart("c"), TextPart("d"))))
    assert list(answer.parts) == [TextPart("abcd")]


def test_a_part_ends_where_a_token_with_logprobs_arrives() -> None:
    """A text's logprobs are searched for among the tokens that had arrived at its end."""
    deltas = ((TextPart("a"),), (), (TextPart("b"), TextPart("c")))
    answer = collected(*deltas, has_logprobs=True)
    assert list(answer.parts.with_ends()) == [(TextPart("a"), 1), (TextPart("bc"), 3)]


PARTS = st.one_of(
    st.builds(TextPart, st.text(max_size=3)),
    st.builds(ReasoningPart, st.text(max_size=3)),
    st.builds(ToolCallArguments, st.integers(0, 1), st.text(max_size=3)),
)


@given(st.lists(st.lists(PARTS, max_size=3).map(tuple), max_size=400), st.booleans())
def test_joining_keeps_texts_and_their_order(
    deltas: list[tuple[OutputPart, ...]], has_logprobs: bool
) -> None:
    start = (ToolCallStart(0, "f"), ToolCallStart(1, "g"))
    answer = collected(start, *deltas, has_logprobs=has_logprobs)
    added = [part for delta in deltas for part in delta]
    assert letters(list(answer.parts)[2:]) == letters(added)
    assert answer.text == joined(added, TextPart)
    assert answer.reasoning == joined(added, ReasoningPart)
    assert [arguments for _, arguments in answer.tool_calls] == [
        joined([part for part in added if getattr(part, "index", None) == call], ToolCallArguments)
        for call in (0, 1)
    ]


def text_of(part: OutputPart) -> str:
    assert not isinstance(part, ToolCallStart)
    return part.arguments if isinstance(part, ToolCallArguments) else part.text


def joined(parts: Sequence[OutputPart], kind: type[OutputPart]) -> str:
    return "".join(text_of(part) for part in parts if isinstance(part, kind))


def letters(parts: Sequence[OutputPart]) -> list[tuple[type[OutputPart], int | None, str]]:
    """Return all characters in order, each with the kind and the call that it belongs to."""
    return [
        (type(part), getattr(part, "index", None), letter)
        for part in parts
        for letter in text_of(part)
    ]


@pytest.mark.parametrize("is_parsed", [True, False])
def test_an_answer_takes_little_more_memory_than_its_text(is_parsed: bool) -> None:
    """A token has 5 characters here and an id of 8 bytes; an array grows in steps of an eighth."""
    num_tokens = 50_000
    answer = ChoiceResult(0, ())
    tracemalloc.start()
    try:
        for token in range(num_tokens):
            text = f"{token % 1000:5d}"
            parts = (TextPart(text),) if is_parsed else ()
            shown = "" if is_parsed else text
            answer.add(ChoiceDelta(0, shown, (TokenId(token),), (), None, parts))
        size, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(answer.text) == 5 * num_tokens
    assert size < 16 * num_tokens
