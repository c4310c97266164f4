"""Grammars of answers that are calls, each in the markup of its family."""

import json
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

from baton.core.grammar import Grammar, GrammarKind

SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""Of arguments: as models write them in training, and never without end."""

NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


class CallForm(StrEnum):
    """JSON is what no family writes by itself, as Llama's but for ``arguments``."""

    HERMES = "hermes"
    LLAMA3 = "llama3"
    MISTRAL = "mistral"
    JSON = "json"


def forced_calls(
    form: CallForm,
    functions: Sequence[Mapping[str, Any]],
    *,
    thinks: bool,
    in_thought: bool,
    one: bool,
) -> Grammar:
    """With ``in_thought`` the prompt has opened a thought; a model that ``thinks`` may open one."""
    rules = [f"start: {_before(thinks, in_thought)}{_calls(form, one)}"]
    if thinks or in_thought:
        rules.append('thought[suffix="</think>"]: /(?s:.*)/')
    rules.append("call: " + " | ".join(f"call_{number}" for number in range(len(functions))))
    for number, function in enumerate(functions):
        rules += _call(form, number, function)
    return Grammar(GrammarKind.LARK, "\n".join(rules) + "\n")


def _before(thinks: bool, in_thought: bool) -> str:
    if in_thought:
        return r"thought /\n{0,2}/ "
    return r'("<think>" thought /\n{0,2}/)? ' if thinks else ""


def _calls(form: CallForm, one: bool) -> str:
    if form is CallForm.HERMES:
        call = r'"<tool_call>\n" call "\n</tool_call>"'
        return call if one else rf'{call} ("\n" {call})*'
    if form is CallForm.MISTRAL:
        more = "" if one else ' (", " call)*'
        return f'"[" call{more} "]"'
    return "call" if one else 'call ("; " call)*'


def _call(form: CallForm, number: int, function: Mapping[str, Any]) -> list[str]:
    key = "parameters" if form is CallForm.LLAMA3 else "arguments"
    head = f'{{"name": {json.dumps(function["name"])}, "{key}": '
    schema = {**(function.get("parameters") or NO_ARGUMENTS), "x-guidance": SPACING}
    return [
        f'call_{number}: {json.dumps(head, ensure_ascii=False)} arguments_{number} "}}"',
        f"arguments_{number}: %json {json.dumps(schema)}",
    ]
