"""The formats of reasoning, a row for each."""

from dataclasses import dataclass, replace

import regex

from router.serving.parsers.answer_tape import END, SPACE
from router.serving.parsers.marks import Mark, Segment, dropped
from router.serving.parsers.tool_formats import HARMONY_SIGNS, HARMONY_SPECIAL, XTML_SPECIAL


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The marks of a family's reasoning. The model ``opens`` it at the beginning of an answer,
    unless the prompt ends with one of ``prompt_opens``; a prompt that ends with one of
    ``prompt_closes`` leaves it out. ``answer_opening`` and ``answer_closing`` are marks around
    text, if there are any. ``signs`` and ``special`` are as in :class:`ToolFormat`."""

    name: str
    opens: str
    closes: str
    marks: tuple[Mark, ...]
    prompt_opens: tuple[str, ...]
    prompt_closes: tuple[str, ...]
    signs: tuple[tuple[str, ...], ...]
    special: tuple[str, ...]
    answer_opening: str = ""
    answer_closing: str = ""
    starts_with_header: bool = False


def _thoughts(
    name: str,
    opens: str,
    closes: str,
    *marks: Mark,
    signs: tuple[str, ...] = (),
    special: tuple[str, ...] = (),
    prompt_closes: str = "",
) -> ReasoningFormat:
    return ReasoningFormat(
        name,
        opens,
        closes,
        (Mark(regex.escape(closes), Segment.THOUGHT, Segment.ANSWER), *marks),
        (opens,),
        (prompt_closes or closes,),
        (signs or (opens,),),
        (*(special or (opens,)), closes),
    )


_MESSAGE_END = rf"<\|(?:end|call|return)\|>(?={SPACE}(?:<\|start\|>|{END}))"

REASONING_FORMATS: tuple[ReasoningFormat, ...] = (
    ReasoningFormat(
        "harmony",
        "<|channel|>analysis<|message|>",
        "<|end|><|start|>assistant",
        (
            Mark(_MESSAGE_END, Segment.THOUGHT, Segment.HEADER),
            Mark(_MESSAGE_END, Segment.TEXT, Segment.HEADER),
            Mark(r"<\|start\|>", Segment.GAP, Segment.HEADER),
        ),
        (),
        (),
        HARMONY_SIGNS,
        HARMONY_SPECIAL,
        answer_opening="<|channel|>final<|message|>",
        starts_with_header=True,
    ),
    ReasoningFormat(
        "kimi_k3",
        "<|open|>think<|sep|>",
        "<|close|>think<|sep|>",
        (
            Mark(r"<\|close\|>think<\|sep\|>", Segment.THOUGHT, Segment.GAP),
            Mark(r"<\|open\|>response<\|sep\|>", Segment.THOUGHT, Segment.TEXT),
            Mark(r"<\|open\|>response<\|sep\|>", Segment.GAP, Segment.TEXT),
            Mark(
                r"<\|(?:close|open)\|>(?:response|tools|message)<\|sep\|>",
                Segment.TEXT,
                Segment.GAP,
            ),
        ),
        ("<|open|>think<|sep|>",),
        ("<|open|>response<|sep|>",),
        (XTML_SPECIAL,),
        XTML_SPECIAL,
        answer_opening="<|open|>response<|sep|>",
        answer_closing="<|close|>response<|sep|>",
    ),
    _thoughts("mistral", "[THINK]", "[/THINK]"),
    _thoughts("seed_oss", "<seed:think>", "</seed:think>"),
    replace(
        _thoughts(
            "command",
            "<|START_THINKING|>",
            "<|END_THINKING|>",
            dropped(r"<\|(?:START|END)_(?:RESPONSE|TEXT)\|>"),
            special=(
                "<|START_THINKING|>",
                "<|START_RESPONSE|>",
                "<|END_RESPONSE|>",
                "<|START_TEXT|>",
                "<|END_TEXT|>",
            ),
        ),
        answer_opening="<|START_RESPONSE|>",
        answer_closing="<|END_RESPONSE|>",
    ),
    _thoughts(
        "gemma4",
        "<|channel>thought",
        "<channel|>",
        signs=("<|channel>", "<channel|>"),
        special=("<|channel>",),
    ),
    _thoughts(
        "hunyuan", "<think>", "</think>", dropped("</?answer>"), signs=("<think>", "<answer>")
    ),
    _thoughts("think", "<think>", "</think>"),
)
