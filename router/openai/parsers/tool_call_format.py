"""The formats of tool calls, and grammar rules for one call in each of them."""

import json
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

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
    that follow the function's schema."""
    rules = ["call: " + " | ".join(f"call_{number}" for number in range(len(functions)))]
    for number, function in enumerate(functions):
        if form is ToolCallFormat.PYTHONIC:
            rules += _python_call_rules(number, function)
        elif form is ToolCallFormat.MISTRAL and has_name_first_calls(marks):
            rules += _name_first_call_rules(number, function, marks)
        else:
            rules += _json_call_rules(form, number, function)
    return rules


def has_name_first_calls(marks: MarkupTokens) -> bool:
    """Whether a Mistral model writes calls as ``f[ARGS]{…}``: it does if its vocabulary has
    ``[ARGS]``."""
    return "[ARGS]" in marks.ids


def _name_first_call_rules(number: int, function: Function, marks: MarkupTokens) -> list[str]:
    name = json.dumps(function["name"])
    return [
        f"call_{number}: {name} {marks.rule('[ARGS]')} arguments_{number}",
        _arguments(f"arguments_{number}", function),
    ]


def _arguments(name: str, function: Function) -> str:
    schema = {**(function.get("parameters") or EMPTY_PARAMETERS), "x-guidance": ARGUMENT_WHITESPACE}
    return f"{name}: %json {json.dumps(schema)}"


def _json_call_rules(form: ToolCallFormat, number: int, function: Function) -> list[str]:
    key = "parameters" if form is ToolCallFormat.LLAMA3 else "arguments"
    head = f'{{"name": {json.dumps(function["name"])}, "{key}": '
    return [
        f'call_{number}: {json.dumps(head, ensure_ascii=False)} arguments_{number} "}}"',
        _arguments(f"arguments_{number}", function),
    ]


def _python_call_rules(number: int, function: Function) -> list[str]:
    """Return grammar rules for a call like ``f(x=1, y="a")``: keyword arguments in the schema's
    order, with values written as in JSON."""
    schema: Mapping[str, Any] = function.get("parameters") or EMPTY_PARAMETERS
    properties: Mapping[str, Any] = schema.get("properties") or {}
    required, defs = schema.get("required") or (), schema.get("$defs")
    prefix = f"call_{number}"
    rules = [f'{prefix}: {json.dumps(function["name"] + "(")} {prefix}_first_0 ")"']
    for index, (name, value) in enumerate(properties.items()):
        value = value if isinstance(value, dict) else {}
        value = {**value, **({"$defs": defs} if defs else {}), "x-guidance": ARGUMENT_WHITESPACE}
        given = f"{prefix}_given_{index}"
        is_optional = name not in required
        for kind, comma in (("first", ""), ("next", '", " ')):
            skip = f" | {prefix}_{kind}_{index + 1}" if is_optional else ""
            rules.append(f"{prefix}_{kind}_{index}: {comma}{given} {prefix}_next_{index + 1}{skip}")
        rules.append(f"{given}: {json.dumps(name + '=')} {given}_value")
        rules.append(f"{given}_value: %json {json.dumps(value)}")
    end = len(properties)
    return [*rules, *(f'{prefix}_{kind}_{end}: ""' for kind in ("first", "next"))]
