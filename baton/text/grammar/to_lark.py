"""Converts grammars of every kind except TOKEN_RULES to llguidance's Lark notation, and rejects
oversized ones."""

import json
import re
from typing import Any

from llguidance import regex_to_lark

from baton.core.grammar import Grammar, GrammarKind
from baton.errors import Invalid
from baton.text.grammar.limits import (
    MAX_CHOICES,
    MAX_DEPTH,
    MAX_GRAMMAR_BYTES,
    MAX_PATTERN_PROPERTIES,
    MAX_REFERENCES,
    MAX_RULES,
)

OPTIONS = '\n%llguidance {"no_forcing": true}\n'
"""Without ``no_forcing``, llguidance computes at each step all text that the grammar forces,
however long: a gigabyte for the pattern ``(abc){100000000}``."""

_RULE = re.compile(r"\s*[?!]?\w+[^:\"/]*:")

JSON_OPTIONS = {"whitespace_pattern": r"(\r?\n[ \t]{0,32}|[ \t]{0,2})"}
"""Allows JSON on one line, or indented on many, but no other whitespace: otherwise, a weak model
might emit whitespace without end."""


def to_lark(grammar: Grammar) -> str:
    """Convert a grammar to Lark notation. Raises Invalid if its text is malformed or too large, and
    for TOKEN_RULES, which can't be converted."""
    if grammar.kind is GrammarKind.LARK:
        check_grammar_text(grammar.text)
        return _from_lark(grammar.text)
    return f"start: {to_lark_rule(grammar)}{OPTIONS}"


def to_lark_rule(grammar: Grammar) -> str:
    """Convert a grammar to the right side of a rule. Raises Invalid if its text is malformed or too
    large, and for TOKEN_RULES, which can't be converted. The kind must not be LARK."""
    check_grammar_text(grammar.text)
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
            raise AssertionError("a Lark grammar is not a single rule")
        case GrammarKind.TOKEN_RULES:
            raise Invalid(
                "token rules can't be converted to a Lark grammar, since they restrict token ids, "
                "not text"
            )


def check_grammar_text(text: str) -> None:
    """Raise Invalid if a grammar's text is too large or can't be encoded."""
    try:
        size_bytes = len(text.encode())
    except UnicodeEncodeError as error:
        raise Invalid("the grammar has an unpaired surrogate") from error
    check_grammar_size(size_bytes)


def check_grammar_size(size_bytes: int) -> None:
    """Raise Invalid for a grammar of this size, or with a part of this size, if it is too large."""
    if size_bytes > MAX_GRAMMAR_BYTES:
        raise Invalid(f"a grammar may have at most {MAX_GRAMMAR_BYTES} bytes")


def _from_schema(schema: Any) -> str:
    """Convert a JSON schema to the body of a Lark rule. The schema must be an object, or true,
    which any JSON value matches. The schema false raises Invalid, since no JSON value matches
    it."""
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise Invalid("a JSON schema must be an object or true")
    if "x-guidance" in schema:
        raise Invalid("x-guidance is not a keyword of JSON schema")
    check_depth(schema)
    _check_size(schema)
    return f"%json {json.dumps({**schema, 'x-guidance': JSON_OPTIONS})}"


def check_depth(value: Any, depth: int = MAX_DEPTH) -> None:
    """Raise Invalid for a JSON value that is nested deeper than ``depth``. This function is not
    recursive, so deep nesting can't overflow the stack."""
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
    raise Invalid(f"a JSON schema may be nested at most {depth} levels deep")


def _check_size(schema: Any) -> None:
    """Raise Invalid for a schema with too many of the keywords whose cost grows superlinearly."""
    patterns = references = 0
    parts = [schema]
    while parts:
        part = parts.pop()
        if isinstance(part, dict):
            properties = part.get("patternProperties")
            patterns += len(properties) if isinstance(properties, dict) else 0
            references += isinstance(part.get("$ref"), str)
            parts += part.values()
        elif isinstance(part, list):
            parts += part
    if patterns > MAX_PATTERN_PROPERTIES:
        most = MAX_PATTERN_PROPERTIES
        raise Invalid(f"a JSON schema may have at most {most} patternProperties, not {patterns}")
    if references > MAX_REFERENCES:
        raise Invalid(f"a JSON schema may have at most {MAX_REFERENCES} $ref, not {references}")


def _from_regex(pattern: str) -> str:
    """Convert a regular expression, which must match the whole answer. ``\\d`` matches only the
    digits 0 to 9."""
    if not pattern:
        raise Invalid("a pattern must not be empty")
    if (len(pattern) - len(pattern.rstrip("\\"))) % 2:
        raise Invalid("a pattern must not end with an incomplete escape")
    return f"/{regex_to_lark(pattern, 'd')}/"


def _from_choices(choices: Any) -> str:
    if not isinstance(choices, list) or not all(isinstance(each, str) for each in choices):
        raise Invalid("choices must be a list of strings")
    if not 0 < len(choices) <= MAX_CHOICES or not all(choices):
        raise Invalid(f"there must be 1 to {MAX_CHOICES} choices, none of them empty")
    return f"/{'|'.join(map(_literal, choices))}/"


def _literal(text: str) -> str:
    """Return a pattern that matches only this text."""
    return "".join(
        each if each.isascii() and each.isalnum() else f"\\x{{{ord(each):x}}}" for each in text
    )


def _from_lark(text: str) -> str:
    if "%llguidance" in text:
        raise Invalid("%llguidance is not supported in a grammar")
    num_rules = sum(map(bool, map(_RULE.match, text.splitlines())))
    if num_rules > MAX_RULES:
        raise Invalid(f"a grammar may have at most {MAX_RULES} rules, not {num_rules}")
    return text + OPTIONS


def _parse_json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Invalid(f"the grammar is not JSON: {error}") from error
