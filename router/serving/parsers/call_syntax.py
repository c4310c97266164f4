"""The syntaxes in which model families write tool calls. Each reads calls from an answer as it
arrives."""

import json
import math
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from enum import Enum, auto
from html import unescape
from typing import Any, Protocol

from router.serving.parsers.answer_tape import (
    MAX_HELD_CHARACTERS,
    SPACE,
    AnswerTape,
    Reading,
    compiled,
)
from router.serving.parsers.model_json import JsonRepairer, is_text, parse_model_json, typed_json

NAME = r"(?P<name>[\w.\-/:]{1,256}+)"

Schemas = Mapping[str, Mapping[str, Any]]
"""The JSON schemas of the offered tools' parameters, by the tools' names."""

WHITE_SPACE = compiled(r"\s++")
_CLASSES_OF_SPACE = {character: compiled(rf"[\s{character}]++") for character in ",;}"}


class Outcome(Enum):
    DONE = auto()
    CUT = auto()
    """The answer ended within a call."""
    NOT_A_CALL = auto()


class CallSink(Protocol):
    """Receives the calls that a syntax reads."""

    @property
    def has_begun(self) -> bool:
        """Whether a call has begun and has not ended."""

    def begin(self, name: str) -> None: ...

    def arguments(self, text: str) -> object:
        """Add to the begun call's arguments, which are JSON."""

    def end(self) -> None:
        """End a call that is complete."""


class CallSyntax(Protocol):
    """The form of calls, from behind the mark that announces them to the end of the last one
    that belongs to this mark."""

    def read(self, tape: AnswerTape, calls: CallSink, schemas: Schemas) -> Reading[Outcome]: ...


def failed(tape: AnswerTape) -> Outcome:
    """The outcome of a match that failed."""
    return Outcome.CUT if tape.is_cut else Outcome.NOT_A_CALL


def read_json(
    tape: AnswerTape, sink: Callable[[str], object], max_size: float = math.inf
) -> Reading[bool]:
    """Read one JSON value and pass it on, mended. Return whether it is complete. Stop after a piece
    with which it is longer than ``max_size`` characters."""
    value = JsonRepairer()
    size = 0
    while not (value.is_done or value.is_invalid) and size <= max_size:
        if not (yield from tape.wait()):
            if rest := value.end():
                sink(rest)
            break
        copy, used = value.push(tape.text, tape.position, len(tape.text) - tape.has_ended)
        tape.take(used)
        size += used
        if copy:
            sink(copy)
    return value.is_done and not value.is_invalid


# -- JSON objects with the name of the tool -------------------------------------------------------

_OPEN_OBJECT = compiled(r"\{")
_KEY = compiled(r'"(?P<key>(?:[^"\\]|\\.){0,256}+)"|\}')
_COLON = compiled(r":")
_AFTER_VALUE = compiled(r"[,}]")
ARGUMENT_KEYS = frozenset({"arguments", "parameters"})
IGNORED_KEYS = frozenset({"id", "type", "tool_call_id"})


@dataclass(frozen=True, slots=True)
class JsonObject:
    """``{"name": "f", "arguments": {…}}``, with the keys in any order, and possibly several such
    objects with ``between`` (``,`` or ``;``) between them. If ``is_announced`` is False, no mark
    came before: then an object is a call only if it names an offered tool, has arguments, and has
    no other keys than those that calls have. ``excess`` is a bracket of which a model may write too
    many after an object, and ``tail`` a pattern of what may follow the last one."""

    name_key: str = "name"
    between: str = ""
    is_announced: bool = True
    excess: str = ""
    tail: str = ""

    def read(self, tape: AnswerTape, calls: CallSink, schemas: Schemas) -> Reading[Outcome]:
        outcome = yield from self._read_object(tape, calls, schemas)
        while outcome is Outcome.DONE and self.between:
            yield from tape.skip(_CLASSES_OF_SPACE[self.between])
            if not (yield from tape.wait()) or tape.front != "{":
                break
            tape.record()
            outcome = yield from self._read_object(tape, calls, schemas)
        if outcome is Outcome.DONE and self.excess:
            yield from tape.skip(_CLASSES_OF_SPACE[self.excess])
        if outcome is Outcome.DONE and self.tail:
            yield from tape.match(compiled(SPACE + self.tail))
        return outcome

    def _read_object(self, tape: AnswerTape, calls: CallSink, schemas: Schemas) -> Reading[Outcome]:
        if (yield from tape.match(_OPEN_OBJECT)) is None:
            return failed(tape)
        names = None if self.is_announced else schemas.keys()
        name: str | None = None
        pending: str | None = None
        size = 0
        while True:
            yield from tape.skip(WHITE_SPACE)
            key = yield from tape.match(_KEY)
            if key is None:
                return failed(tape)
            if key["key"] is None:
                return self._end_object(calls, name)
            word = key["key"]
            known = word == self.name_key or word in ARGUMENT_KEYS or word in IGNORED_KEYS
            if names is not None and not known:
                return Outcome.NOT_A_CALL
            yield from tape.skip(WHITE_SPACE)
            if (yield from tape.match(_COLON)) is None:
                return failed(tape)
            yield from tape.skip(WHITE_SPACE)
            if not (yield from tape.wait()):
                return Outcome.CUT
            if calls.has_begun:
                if not (yield from read_json(tape, _ignore)):
                    return Outcome.CUT
            elif name is not None and word in ARGUMENT_KEYS and tape.front == "{":
                calls.begin(name)
                if not (yield from read_json(tape, calls.arguments)):
                    return Outcome.CUT
            else:
                value: list[str] = []
                is_whole = yield from read_json(tape, value.append, MAX_HELD_CHARACTERS)
                size += sum(map(len, value))
                if size > MAX_HELD_CHARACTERS or (not is_whole and not tape.has_ended):
                    return Outcome.NOT_A_CALL
                if not is_whole:
                    return Outcome.CUT
                raw = "".join(value)
                if word == self.name_key:
                    name = _name(raw, names)
                    if name is None:
                        return Outcome.NOT_A_CALL
                elif word in ARGUMENT_KEYS:
                    pending = _arguments(raw)
                if name is not None and pending is not None:
                    calls.begin(name)
                    calls.arguments(pending)
            yield from tape.skip(WHITE_SPACE)
            after = yield from tape.match(_AFTER_VALUE)
            if after is None:
                return Outcome.CUT if calls.has_begun else failed(tape)
            if after[0] == "}":
                return self._end_object(calls, name)

    def _end_object(self, calls: CallSink, name: str | None) -> Outcome:
        if not calls.has_begun:
            if not name or not self.is_announced:
                return Outcome.NOT_A_CALL
            calls.begin(name)
            calls.arguments("{}")
        calls.end()
        return Outcome.DONE


def _ignore(text: str) -> None:
    """Values after a call's arguments are ignored, however long they are."""


def _decoded(raw: str) -> object:
    try:
        return parse_model_json(raw)
    except ValueError:
        return None


def _name(raw: str, names: Set[str] | None) -> str | None:
    """Return the name of the tool; None if it is none of ``names``, or no name."""
    name = _decoded(raw)
    return name if isinstance(name, str) and (names is None or name in names) else None


def _arguments(raw: str) -> str:
    """Return the arguments as JSON. Some models write the object as a string, or null for no
    arguments."""
    if raw.startswith('"'):
        value = _decoded(raw)
        return (value or "{}") if isinstance(value, str) else raw
    return "{}" if raw == "null" else raw


@dataclass(frozen=True, slots=True)
class JsonList:
    """A list of JSON objects, and ``tail``, a pattern of what may follow it."""

    calls: JsonObject
    tail: str = ""

    def read(self, tape: AnswerTape, calls: CallSink, schemas: Schemas) -> Reading[Outcome]:
        yield from tape.skip(WHITE_SPACE)
        if (yield from tape.match(_OPEN_LIST)) is None:
            return failed(tape)
        outcome = Outcome.DONE
        yield from tape.skip(WHITE_SPACE)
        if (yield from tape.wait()) and tape.front == "{":
            outcome = yield from self.calls.read(tape, calls, schemas)
        elif tape.is_at_end:
            return Outcome.CUT
        elif tape.front != "]":
            return Outcome.NOT_A_CALL
        if outcome is Outcome.DONE:
            yield from tape.match(_CLOSE_LIST)
            if self.tail:
                yield from tape.match(compiled(SPACE + self.tail))
        return outcome


_OPEN_LIST = compiled(r"\[")
_CLOSE_LIST = compiled(r"\]")


@dataclass(frozen=True, slots=True)
class Choice:
    """One of several syntaxes: the first one whose pattern matches what follows."""

    options: tuple[tuple[str, CallSyntax], ...]

    def read(self, tape: AnswerTape, calls: CallSink, schemas: Schemas) -> Reading[Outcome]:
        yield from tape.skip(WHITE_SPACE)
        for pattern, syntax in self.options:
            if (yield from tape.match(compiled(f"(?={pattern})"))) is not None:
                return (yield from syntax.read(tape, calls, schemas))
        return failed(tape)


# -- a name, and then JSON ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NamedJson:
    """The tool's name, within a ``head`` that is a pattern, and then its arguments in JSON, and a
    ``tail``, a pattern of what may follow."""

    head: str
    tail: str

    def read(self, tape: AnswerTape, calls: CallSink, schemas: Schemas) -> Reading[Outcome]:
        head = yield from tape.match(compiled(self.head))
        if head is None:
            return failed(tape)
        calls.begin(head["name"])
        if not (yield from read_json(tape, calls.arguments)):
            return Outcome.CUT
        calls.end()
        yield from tape.match(compiled(self.tail))
        return Outcome.DONE


# -- elements -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Elements:
    """A call with an element for each argument. All fields are patterns. ``head`` has the name of
    the tool, ``argument`` the ``key`` and possibly ``is_text`` (``true`` if the value is a string
    and ``false`` if it is JSON) or ``type``; without them, the tool's schema decides.
    ``value_end`` is where a value ends by the rules of the format: elsewhere, the same characters
    belong to the value. ``new_argument`` begins another argument after a value whose end the model
    forgot, if its key, ``forgotten``, is one of the schema's. ``end`` is the end of the call, and
    ``tail`` what may follow it."""

    head: str
    argument: str
    value_end: str
    end: str
    new_argument: str = ""
    tail: str = ""
    value_begins: str = ""
    """A pattern of what precedes each value, and does not belong to it. It must match something,
    or nothing before a character."""
    is_escaped: bool = False
    """Whether names and keys have escapes like ``&amp;``."""

    def read(self, tape: AnswerTape, calls: CallSink, schemas: Schemas) -> Reading[Outcome]:
        head = yield from tape.match(compiled(self.head))
        if head is None:
            return failed(tape)
        name = self._word(head["name"])
        schema = schemas.get(name, {})
        properties = schema.get("properties")
        properties = properties if isinstance(properties, dict) else {}
        if head.groupdict().get("empty"):
            return (yield from self._end(tape, calls, name, 0))
        follower = compiled(f"{SPACE}(?:(?P<argument>{self.argument})|{self.end})")
        keys: set[str] = set()
        while True:
            yield from tape.skip(WHITE_SPACE)
            found = yield from tape.match(follower)
            if found is None:
                return Outcome.CUT if calls.has_begun else failed(tape)
            if found["argument"] is None:
                return (yield from self._end(tape, calls, name, len(keys)))
            key = self._word(found["key"].strip())
            is_new = key not in keys
            if is_new:
                if not keys:
                    calls.begin(name)
                calls.arguments(("{" if not keys else ", ") + _json(key) + ": ")
                keys.add(key)
            if self.value_begins:
                yield from tape.match(compiled(self.value_begins))
            sink = calls.arguments if is_new else _ignore
            value = _value_of(found.groupdict(), properties.get(key), sink)
            value_end = compiled(
                f"{self.value_end}|{self.new_argument}" if self.new_argument else self.value_end
            )
            while True:
                end = yield from tape.until(value_end, value.push)
                if end is None:
                    return Outcome.CUT
                forgotten = end.groupdict().get("forgotten")
                if forgotten is None or (forgotten in properties and forgotten not in keys):
                    break
                value.push(end[0])
            value.end()

    def _end(
        self, tape: AnswerTape, calls: CallSink, name: str, num_arguments: int
    ) -> Reading[Outcome]:
        if not num_arguments:
            calls.begin(name)
            calls.arguments("{")
        calls.arguments("}")
        calls.end()
        if self.tail:
            yield from tape.match(compiled(SPACE + self.tail))
        return Outcome.DONE

    def _word(self, text: str) -> str:
        return unescape(text) if self.is_escaped else text


class _TextValue:
    """A value that is a string: it is passed on as it arrives."""

    def __init__(self, sink: Callable[[str], object]) -> None:
        self._sink = sink
        sink('"')

    def push(self, text: str) -> None:
        self._sink(_json(text)[1:-1])

    def end(self) -> None:
        self._sink('"')


class _TypedValue:
    """A value whose type is known only once it is complete."""

    def __init__(self, sink: Callable[[str], object], schema: Any) -> None:
        self._sink = sink
        self._schema = schema
        self._text: list[str] = []

    def push(self, text: str) -> None:
        self._text.append(text)

    def end(self) -> None:
        self._sink(typed_json("".join(self._text), self._schema))


def _value_of(
    attributes: Mapping[str, str | None], schema: Any, sink: Callable[[str], object]
) -> _TextValue | _TypedValue:
    given = attributes.get("type")
    told = attributes.get("is_text")
    if given is not None or told is not None:
        text = given == "string" or told == "true"
        return _TextValue(sink) if text else _TypedValue(sink, {})
    return _TextValue(sink) if is_text(schema) else _TypedValue(sink, schema)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
