"""The formats of tool calls, and grammar rules for one call in each of them."""

import json
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any

from baton.errors import Invalid
from baton.text.grammar.to_lark import check_grammar_size
from router.openai.parsers.markup_tokens import MarkupTokens

ARGUMENT_WHITESPACE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""The white space between arguments: it is as in models' training data, and of bounded length."""

EMPTY_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}

Function = Mapping[str, Any]


class ToolCallFormat(StrEnum):
    """The formats of tool calls. JSON is used for models without a format of their own: it is like
    LLAMA3, but with ``arguments`` instead of ``parameters``."""

    HERMES = "hermes"
    LLAMA3 = "llama3"
    MISTRAL = "mistral"
    PYTHONIC = "pythonic"
    JSON = "json"


def tool_call_rules(
    form: ToolCallFormat, functions: Sequence[Function], marks: MarkupTokens
) -> list[str]:
    """Return grammar rules that define ``call``: a call of any of ``functions``, with arguments
    that follow the function's schema. Raises Invalid for a malformed schema, and as soon as the
    rules are larger than a grammar may be, since they may be many times as large as the
    functions."""
    rules: list[str] = []
    size_bytes = 0
    for rule in _call_rules(form, functions, marks):
        size_bytes += len(rule)
        check_grammar_size(size_bytes)
        rules.append(rule)
    return rules


def _call_rules(
    form: ToolCallFormat, functions: Sequence[Function], marks: MarkupTokens
) -> Iterator[str]:
    yield "call: " + " | ".join(f"call_{number}" for number in range(len(functions)))
    for number, function in enumerate(functions):
        if form is ToolCallFormat.PYTHONIC:
            yield from _python_call_rules(number, function)
        elif form is ToolCallFormat.MISTRAL and has_name_first_calls(marks):
            yield from _name_first_call_rules(number, function, marks)
        else:
            yield from _json_call_rules(form, number, function)


def has_name_first_calls(marks: MarkupTokens) -> bool:
    """Whether a Mistral model writes calls as ``f[ARGS]{…}``: it does if its vocabulary has
    ``[ARGS]``."""
    return "[ARGS]" in marks.ids


def _name_first_call_rules(number: int, function: Function, marks: MarkupTokens) -> Iterator[str]:
    name = json.dumps(function["name"])
    yield f"call_{number}: {name} {marks.rule('[ARGS]')} arguments_{number}"
    yield _arguments(f"arguments_{number}", function)


def _arguments(name: str, function: Function) -> str:
    schema = {**(function.get("parameters") or EMPTY_PARAMETERS), "x-guidance": ARGUMENT_WHITESPACE}
    return f"{name}: %json {json.dumps(schema)}"


def _json_call_rules(form: ToolCallFormat, number: int, function: Function) -> Iterator[str]:
    key = "parameters" if form is ToolCallFormat.LLAMA3 else "arguments"
    head = f'{{"name": {json.dumps(function["name"])}, "{key}": '
    yield f'call_{number}: {json.dumps(head, ensure_ascii=False)} arguments_{number} "}}"'
    yield _arguments(f"arguments_{number}", function)


def _python_call_rules(number: int, function: Function) -> Iterator[str]:
    """Yield grammar rules for a call like ``f(x=1, y="a")``: keyword arguments in the schema's
    order, with values written as in JSON. The rule of each argument repeats the schema's
    definitions."""
    schema: Mapping[str, Any] = function.get("parameters") or EMPTY_PARAMETERS
    properties, defs = schema.get("properties") or {}, schema.get("$defs")
    required = _required_names(schema)
    if not isinstance(properties, dict):
        raise Invalid("`properties` of a function's parameters must be an object")
    prefix = f"call_{number}"
    yield f'{prefix}: {json.dumps(function["name"] + "(")} {prefix}_first_0 ")"'
    for index, (name, value) in enumerate(properties.items()):
        value = value if isinstance(value, dict) else {}
        value = {**value, **({"$defs": defs} if defs else {}), "x-guidance": ARGUMENT_WHITESPACE}
        given = f"{prefix}_given_{index}"
        is_optional = name not in required
        for kind, comma in (("first", ""), ("next", '", " ')):
            skip = f" | {prefix}_{kind}_{index + 1}" if is_optional else ""
            yield f"{prefix}_{kind}_{index}: {comma}{given} {prefix}_next_{index + 1}{skip}"
        yield f"{given}: {json.dumps(name + '=')} {given}_value"
        yield f"{given}_value: %json {json.dumps(value)}"
    for kind in ("first", "next"):
        yield f'{prefix}_{kind}_{len(properties)}: ""'


def _required_names(schema: Mapping[str, Any]) -> frozenset[str]:
    names = schema.get("required") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise Invalid("`required` of a function's parameters must be a list of names")
    return frozenset(names)
