"""Grammars of every kind as one: Lark's notation, as llguidance reads it, and what is refused."""

import json
import re
from typing import Any

from llguidance import regex_to_lark

from baton.core.grammar import Grammar, GrammarKind
from baton.errors import Invalid

MAX_GRAMMAR_BYTES = 64 * 1024
"""The longest schemas in use have some thousand bytes."""

MAX_CHOICES = 2048
MAX_DEPTH = 60
"""Of a schema, as objects and lists in one another; the library takes twice as much at most."""

MAX_PATTERN_PROPERTIES = 64
"""Each is compared with all others."""

MAX_REFERENCES = 1024
"""A chain of them is followed by calls within calls."""

MAX_RULES = 2048
"""Of a grammar in Lark's notation."""

OPTIONS = '\n%llguidance {"no_forcing": true}\n'
"""Otherwise what can come only one way is written out ahead at each step, however long: a gigabyte
for the pattern ``(abc){100000000}``."""

_RULE = re.compile(r"\s*[?!]?\w+[^:\"/]*:")

JSON_OPTIONS = {"whitespace_pattern": r"(\r?\n[ \t]{0,32}|[ \t]{0,2})"}
"""As JSON is written on one line, or indented on many. A weak model fills any room with blanks."""


def to_lark(grammar: Grammar) -> str:
    """Raises Invalid for a text that can't be one of its kind."""
    if grammar.kind is GrammarKind.LARK:
        _check_text(grammar.text)
        return _from_lark(grammar.text)
    return f"start: {to_lark_rule(grammar)}{OPTIONS}"


def to_lark_rule(grammar: Grammar) -> str:
    """What an answer is made of, as the right side of a rule; of any kind but LARK. Raises Invalid
    for a text that can't be one of its kind."""
    _check_text(grammar.text)
    match grammar.kind:
        case GrammarKind.JSON_OBJECT:
            return _from_schema({"type": "object"})
        case GrammarKind.JSON_SCHEMA:
            return _from_schema(_parse_json(grammar.text))
        case GrammarKind.REGEX:
            return _from_regex(grammar.text)
        case GrammarKind.CHOICE:
            return _from_choices(_parse_json(grammar.text))
        case GrammarKind.LARK:
            raise AssertionError("a whole grammar is no rule")


def _check_text(text: str) -> None:
    try:
        size_bytes = len(text.encode())
    except UnicodeEncodeError as error:
        raise Invalid("half a surrogate pair is no text") from error
    if size_bytes > MAX_GRAMMAR_BYTES:
        raise Invalid(f"a grammar has at most {MAX_GRAMMAR_BYTES} bytes")


def _from_schema(schema: Any) -> str:
    """Anything but true and an object says nothing, or nothing that can be said."""
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise Invalid("a JSON schema is an object")
    if "x-guidance" in schema:
        raise Invalid("x-guidance is not a keyword of JSON schema")
    check_depth(schema)
    _check_size(schema)
    return f"%json {json.dumps({**schema, 'x-guidance': JSON_OPTIONS})}"


def check_depth(value: Any, depth: int = MAX_DEPTH) -> None:
    """Raises Invalid for a JSON value that is nested deeper. Iterative."""
    level = [value]
    for _ in range(depth):
        level = [
            child
            for parent in level
            if isinstance(parent, (dict, list))
            for child in (parent.values() if isinstance(parent, dict) else parent)
        ]
        if not level:
            return
    raise Invalid(f"a JSON schema is nested {depth} deep at most")


def _check_size(schema: Any) -> None:
    """Raises Invalid for a schema whose parts multiply in each other's company."""
    patterns = references = 0
    parts = [schema]
    while parts:
        part = parts.pop()
        if isinstance(part, dict):
            given = part.get("patternProperties")
            patterns += len(given) if isinstance(given, dict) else 0
            references += isinstance(part.get("$ref"), str)
            parts += part.values()
        elif isinstance(part, list):
            parts += part
    if patterns > MAX_PATTERN_PROPERTIES:
        most = MAX_PATTERN_PROPERTIES
        raise Invalid(f"a JSON schema has at most {most} patternProperties, and this {patterns}")
    if references > MAX_REFERENCES:
        raise Invalid(f"a JSON schema has at most {MAX_REFERENCES} $ref, and this {references}")


def _from_regex(pattern: str) -> str:
    """``\\d`` is a digit from 0 to 9, and the whole answer matches."""
    if not pattern:
        raise Invalid("a pattern is not empty")
    if (len(pattern) - len(pattern.rstrip("\\"))) % 2:
        raise Invalid("a pattern does not end in the midst of an escape")
    return f"/{regex_to_lark(pattern, 'd')}/"


def _from_choices(choices: Any) -> str:
    if not isinstance(choices, list) or not all(isinstance(each, str) for each in choices):
        raise Invalid("choices are a list of strings")
    if not 0 < len(choices) <= MAX_CHOICES or not all(choices):
        raise Invalid(f"there are 1 to {MAX_CHOICES} choices, none of them empty")
    return f"/{'|'.join(map(_literal, choices))}/"


def _literal(text: str) -> str:
    """A pattern that matches this text alone."""
    return "".join(
        each if each.isascii() and each.isalnum() else f"\\x{{{ord(each):x}}}" for each in text
    )


def _from_lark(text: str) -> str:
    if "%llguidance" in text:
        raise Invalid("%llguidance is not supported in a grammar")
    num_rules = sum(map(bool, map(_RULE.match, text.splitlines())))
    if num_rules > MAX_RULES:
        raise Invalid(f"a grammar has at most {MAX_RULES} rules, and this {num_rules}")
    return text + OPTIONS


def _parse_json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Invalid(f"not JSON: {error}") from error
