"""Tool calls as Gemma 4 writes them: objects with bare keys, and strings between marks.

<|tool_call>call:f{x:1,s:<|"|>text<|"|>}<tool_call|>
"""

import json
from dataclasses import dataclass

from router.serving.parsers.answer_tape import AnswerTape, Reading, compiled
from router.serving.parsers.call_syntax import (
    WHITE_SPACE,
    CallSink,
    Outcome,
    Schemas,
    failed,
)
from router.serving.parsers.model_json import typed_json

QUOTE = '<|"|>'

MAX_DEPTH = 512
"""The maximum depth of nested values."""

_HEAD = compiled(r"\s{0,64}+call:(?P<name>[^\s{}<>]{1,256}+)\s{0,64}+(?=\{)")
_TAIL = compiled(r"\s{0,64}+<tool_call\|>")
_QUOTE = compiled(r'<\|"\|>')
_KEY = compiled(r'<\|"\|>(?P<quoted>[^<]{0,256}+)<\|"\|>\s{0,64}+:|(?P<key>[^<>{}\[\]:,]{1,256}+):')
_SCALAR = compiled(r"(?P<word>[^<>{}\[\],]{1,1024}+)(?=[,}\]])")
_MARK = compiled(r"[{}\[\],]")


@dataclass(frozen=True, slots=True)
class GemmaCall:
    def read(self, tape: AnswerTape, calls: CallSink, schemas: Schemas) -> Reading[Outcome]:
        head = yield from tape.match(_HEAD)
        if head is None:
            return failed(tape)
        calls.begin(head["name"])
        if not (yield from _read_value(tape, calls)):
            return Outcome.CUT
        calls.end()
        yield from tape.match(_TAIL)
        return Outcome.DONE


def _read_value(tape: AnswerTape, calls: CallSink) -> Reading[bool]:
    """Read an object, and pass it on as JSON. Return whether it is complete."""
    closing: list[str] = []
    is_first = True  # no element of the innermost object or list has been read
    while True:
        yield from tape.skip(WHITE_SPACE)
        if not (yield from tape.wait()):
            return False
        character = tape.front
        if closing and character == closing[-1]:
            tape.take(1)
            calls.arguments(closing.pop())
            if not closing:
                return True
            is_first = False
            continue
        if closing:
            if character == ",":
                tape.take(1)
                if not is_first:
                    is_first = True
                    calls.arguments(", ")
                continue
            if not is_first and character != ",":
                return False
            if closing[-1] == "}":
                key = yield from tape.match(_KEY)
                if key is None:
                    return False
                word = key["key"].strip() if key["quoted"] is None else key["quoted"]
                calls.arguments(json.dumps(word, ensure_ascii=False) + ": ")
                yield from tape.skip(WHITE_SPACE)
                if not (yield from tape.wait()):
                    return False
                character = tape.front
        if character in "{[":
            if len(closing) == MAX_DEPTH:
                return False
            tape.take(1)
            calls.arguments(character)
            closing.append("}" if character == "{" else "]")
            is_first = True
            continue
        if not (yield from _read_scalar(tape, calls)):
            return False
        is_first = False


def _read_scalar(tape: AnswerTape, calls: CallSink) -> Reading[bool]:
    if tape.front == "<":
        if (yield from tape.match(_QUOTE)) is None:
            return False
        calls.arguments('"')
        end = yield from tape.until(
            _QUOTE, lambda text: calls.arguments(json.dumps(text, ensure_ascii=False)[1:-1])
        )
        if end is not None:
            calls.arguments('"')
        return end is not None
    word = yield from tape.match(_SCALAR)
    if word is None:
        return False
    calls.arguments(typed_json(word["word"].strip(), {}))
    return True
