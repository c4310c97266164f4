"""The families of markup that calls are written in, and one call of each as rules of a grammar."""

import json
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

from router.openai.parsers.markup_tokens import MarkupTokens

ARGUMENT_WHITESPACE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""Of arguments: as models write them in training, and never without end."""

EMPTY_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}

Function = Mapping[str, Any]


class ToolCallFormat(StrEnum):
    """JSON is what no family writes by itself, as Llama's but for ``arguments``."""

    HERMES = "hermes"
    LLAMA3 = "llama3"
    MISTRAL = "mistral"
    PYTHONIC = "pythonic"
    JSON = "json"


def tool_call_rules(
    form: ToolCallFormat, functions: Sequence[Function], marks: MarkupTokens
) -> list[str]:
    """A rule ``call``: of any of them, with arguments by their schemas."""
    rules = ["call: " + " | ".join(f"call_{number}" for number in range(len(functions)))]
    for number, function in enumerate(functions):
        if form is ToolCallFormat.PYTHONIC:
            rules += _python_call_rules(number, function)
        elif form is ToolCallFormat.MISTRAL and writes_name_first(marks):
            rules += _name_first_call_rules(number, function, marks)
        else:
            rules += _json_call_rules(form, number, function)
    return rules


def writes_name_first(marks: MarkupTokens) -> bool:
    """Whether a model of Mistral's writes ``f[ARGS]{…}``: its vocabulary has the mark."""
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
    """``f(x=1, y="a")``: keywords in the schema's order, their values as JSON writes them."""
    schema: Mapping[str, Any] = function.get("parameters") or EMPTY_PARAMETERS
    properties: Mapping[str, Any] = schema.get("properties") or {}
    required, defs = schema.get("required") or (), schema.get("$defs")
    prefix = f"call_{number}"
    rules = [f'{prefix}: {json.dumps(function["name"] + "(")} {prefix}_first_0 ")"']
    for place, (name, value) in enumerate(properties.items()):
        value = value if isinstance(value, dict) else {}
        value = {**value, **({"$defs": defs} if defs else {}), "x-guidance": ARGUMENT_WHITESPACE}
        given = f"{prefix}_given_{place}"
        skips = name not in required
        for kind, comma in (("first", ""), ("next", '", " ')):
            skip = f" | {prefix}_{kind}_{place + 1}" if skips else ""
            rules.append(f"{prefix}_{kind}_{place}: {comma}{given} {prefix}_next_{place + 1}{skip}")
        rules.append(f"{given}: {json.dumps(name + '=')} {given}_value")
        rules.append(f"{given}_value: %json {json.dumps(value)}")
    end = len(properties)
    return [*rules, *(f'{prefix}_{kind}_{end}: ""' for kind in ("first", "next"))]
