"""Grammar rules for tool calls whose arguments follow the tools' schemas. A format's syntax reads
whatever its grammar allows."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Protocol

from baton.errors import Invalid
from router.serving.parsers.markup_tokens import MarkupTokens
from router.serving.parsers.model_json import types_of

ARGUMENT_WHITESPACE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""The white space between arguments: it is as in models' training data, and of bounded length."""

EMPTY_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}

Function = Mapping[str, Any]


class ArgumentStyle(Protocol):
    """The form of a call's arguments."""

    def rules(self, name: str, parameters: Mapping[str, Any], marks: MarkupTokens) -> Iterator[str]:
        """Yield grammar rules that define ``name``: arguments that follow the schema."""
        ...


@dataclass(frozen=True, slots=True)
class JsonArguments:
    def rules(self, name: str, parameters: Mapping[str, Any], marks: MarkupTokens) -> Iterator[str]:
        yield json_rule(name, parameters)


def json_rule(name: str, schema: Mapping[str, Any]) -> str:
    return f"{name}: %json {json.dumps({**schema, 'x-guidance': ARGUMENT_WHITESPACE})}"


@dataclass(frozen=True, slots=True)
class KeyedArguments:
    """An element for each argument, in the schema's order: ``head`` with ``{key}``, the value, and
    ``tail``, with ``between`` between elements. Strings are written as they are and end at ``tail``
    if ``text_is_raw`` is True, else as in JSON. ``{is_text}`` and ``{type}`` in ``head`` tell the
    value's type."""

    head: str
    tail: str = ""
    between: str = ""
    text_is_raw: bool = True

    def rules(self, name: str, parameters: Mapping[str, Any], marks: MarkupTokens) -> Iterator[str]:
        properties, defs = _properties_of(parameters), parameters.get("$defs")
        required = _required_names(parameters)
        if not properties and parameters.get("additionalProperties") is not False:
            yield from self._free_rules(name, marks)
            return
        for index, (key, schema) in enumerate(properties.items()):
            yield from self._element_rules(f"{name}_{index}", key, _with_defs(schema, defs), marks)
        between = marks.literal(self.between) if self.between else ""
        yield from _sequence_rules(name, list(properties), required, between)

    def _element_rules(
        self, name: str, key: str, schema: Mapping[str, Any], marks: MarkupTokens
    ) -> Iterator[str]:
        is_raw = self.text_is_raw and (not types_of(schema) or "string" in types_of(schema))
        kind = "string" if is_raw else next(iter(sorted(types_of(schema))), "object")
        words = {"{key}": key, "{is_text}": "true" if is_raw else "false", "{type}": kind}
        head = marks.literal(_filled(self.head, words))
        if not is_raw:
            tail = f" {marks.literal(self.tail)}" if self.tail else ""
            yield f"{name}: {head} {name}_value{tail}"
            yield json_rule(f"{name}_value", schema)
            return
        options = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if options is not None:
            texts = [each if isinstance(each, str) else json.dumps(each) for each in options]
            choice = " | ".join(marks.literal(text + self.tail) for text in texts)
            yield f"{name}: {head} ({choice})"
        else:
            yield f"{name}: {head} {name}_value"
            yield from marks.rules_until(f"{name}_value", self.tail)

    def _free_rules(self, name: str, marks: MarkupTokens) -> Iterator[str]:
        """Yield rules for arguments of which nothing is known."""
        before, _, after = _filled(self.head, {"{is_text}": "true", "{type}": "string"}).partition(
            "{key}"
        )
        before, after = (marks.literal(text) if text else "" for text in (before, after))
        between = marks.literal(self.between) if self.between else ""
        yield f"{name}: ({name}_any ({between} {name}_any)*)?"
        if self.text_is_raw:
            yield f"{name}_any: {before} {name.upper()}_KEY {after} {name}_value"
            yield from marks.rules_until(f"{name}_value", self.tail)
        else:
            tail = marks.literal(self.tail) if self.tail else ""
            yield f"{name}_any: {before} {name.upper()}_KEY {after} {name}_value {tail}"
            yield json_rule(f"{name}_value", {})
        yield rf"{name.upper()}_KEY: /[A-Za-z_][\w\-]*/"


@dataclass(frozen=True, slots=True)
class GemmaArguments:
    """Objects with bare keys, and strings between marks."""

    quote: str

    def rules(self, name: str, parameters: Mapping[str, Any], marks: MarkupTokens) -> Iterator[str]:
        properties, defs = _properties_of(parameters), parameters.get("$defs")
        required = _required_names(parameters)
        if not properties and parameters.get("additionalProperties") is not False:
            yield f'{name}: "{{" ({name}_pair ("," {name}_pair)*)? "}}"'
            yield from self._any_rules(name, marks)
            return
        yield f'{name}: "{{" {name}_pairs "}}"'
        for index, (key, schema) in enumerate(properties.items()):
            given = f"{name}_pairs_{index}"
            yield f"{given}: {json.dumps(key + ':')} {given}_value"
            yield from self._value_rules(f"{given}_value", _with_defs(schema, defs), marks)
        yield from _sequence_rules(f"{name}_pairs", list(properties), required, '","')

    def _value_rules(
        self, name: str, schema: Mapping[str, Any], marks: MarkupTokens
    ) -> Iterator[str]:
        kinds = types_of(schema)
        options = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if options is not None:
            quote = marks.literal(self.quote)
            written = (
                f"{quote} {marks.literal(each)} {quote}"
                if isinstance(each, str) and each
                else json.dumps(json.dumps(each))
                for each in options
            )
            yield f"{name}: {' | '.join(written)}"
        elif kinds == {"string"}:
            yield f"{name}: {marks.literal(self.quote)} {name}_text"
            yield from marks.rules_until(f"{name}_text", self.quote)
        elif kinds and kinds <= {"integer", "number", "boolean", "null"}:
            yield json_rule(name, schema)
        elif kinds == {"object"} and _properties_of(schema):
            yield from self.rules(name, schema, marks)
        elif kinds == {"array"} and isinstance(schema.get("items"), dict):
            items = _with_defs(schema["items"], schema.get("$defs"))
            yield f'{name}: "[" ({name}_item ("," {name}_item)*)? "]"'
            yield from self._value_rules(f"{name}_item", items, marks)
        else:
            yield f"{name}: {name}_any"
            yield from self._any_rules(name, marks)

    def _any_rules(self, name: str, marks: MarkupTokens) -> Iterator[str]:
        yield (
            f"{name}_any: {marks.literal(self.quote)} {name}_text | {name}_scalar"
            f' | "[" ({name}_any ("," {name}_any)*)? "]"'
            f' | "{{" ({name}_pair ("," {name}_pair)*)? "}}"'
        )
        yield from marks.rules_until(f"{name}_text", self.quote)
        yield f'{name}_pair: {name.upper()}_KEY ":" {name}_any'
        yield rf"{name.upper()}_KEY: /[A-Za-z_][\w\- ]*/"
        yield json_rule(f"{name}_scalar", {"type": ["number", "boolean", "null"]})


@dataclass(frozen=True, slots=True)
class Writing:
    """The form of calls: ``opening``, the calls with ``between`` between them, and ``closing``;
    each call is ``head`` with ``{name}``, the arguments, and ``tail``. ``{number}`` stands for any
    number."""

    head: str
    arguments: ArgumentStyle
    tail: str = ""
    between: str = ""
    opening: str = ""
    closing: str = ""

    def rules(self, functions: Sequence[Function], marks: MarkupTokens) -> Iterator[str]:
        """Yield grammar rules that define ``call``: a call of any of ``functions``, without what
        precedes the tool's name."""
        yield "call: " + " | ".join(f"call_{number}" for number in range(len(functions)))
        after = self.head.partition("{name}")[2]
        tail = marks.literal(self.tail) if self.tail else ""
        for number, function in enumerate(functions):
            name = f"call_{number}"
            head = marks.literal(function["name"] + after)
            yield f"{name}: {head} args_{number} {tail}"
            parameters = function.get("parameters") or EMPTY_PARAMETERS
            yield from self.arguments.rules(f"args_{number}", parameters, marks)

    @property
    def begins(self) -> str:
        """The text that precedes the first call's name."""
        return self.opening + self.before_name

    @property
    def before_name(self) -> str:
        return self.head.partition("{name}")[0]


def _filled(text: str, words: Mapping[str, str]) -> str:
    return re.sub(r"\{\w+\}", lambda found: words.get(found[0], found[0]), text)


def _sequence_rules(
    name: str, keys: Sequence[str], required: Set[str], between: str
) -> Iterator[str]:
    """Yield rules that define ``name``: the elements ``name_0``, ``name_1``, … for the keys, in
    their order, without some of those that are not required."""
    yield f"{name}: {name}_f0"
    for index, key in enumerate(keys):
        for kind, comma in (("f", ""), ("n", f"{between} ")):
            skip = "" if key in required else f" | {name}_{kind}{index + 1}"
            yield f"{name}_{kind}{index}: {comma}{name}_{index} {name}_n{index + 1}{skip}"
    for kind in "fn":
        yield f'{name}_{kind}{len(keys)}: ""'


def _with_defs(schema: Any, defs: Any) -> Mapping[str, Any]:
    """Return the schema of a value with the definitions of the schema around it."""
    return {**(schema if isinstance(schema, dict) else {}), **({"$defs": defs} if defs else {})}


def _properties_of(schema: Mapping[str, Any]) -> dict[str, Any]:
    properties = schema.get("properties") or {}
    if not isinstance(properties, dict):
        raise Invalid("`properties` of a function's parameters must be an object")
    return properties


def _required_names(schema: Mapping[str, Any]) -> frozenset[str]:
    names = schema.get("required") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise Invalid("`required` of a function's parameters must be a list of names")
    return frozenset(names)
