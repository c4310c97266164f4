"""The types of values that models write as plain text: they follow from the tool's schema."""

import json
import math
from collections.abc import Set
from typing import Any

from router.openai.parsers.model_json import parse_model_json

_TYPES_OF = {
    str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null",
    dict: "object", list: "array",
}  # fmt: skip
_WORDS = {"true": True, "false": False, "null": None, "none": None}


def types_of(schema: Any) -> frozenset[str]:
    """Return the JSON types that a schema allows at its top level. Without any information the set
    is empty."""
    if not isinstance(schema, dict):
        return frozenset()
    kinds = schema.get("type")
    found = {kinds} if isinstance(kinds, str) else set(kinds or ()) if _is_names(kinds) else set()
    if not found:
        values = schema.get("enum", [schema["const"]] if "const" in schema else [])
        found = {_TYPES_OF[type(value)] for value in values if type(value) in _TYPES_OF}
    for word in ("anyOf", "oneOf", "allOf"):
        options = schema.get(word)
        for option in options if isinstance(options, list) else ():
            found |= types_of(option)
    return frozenset(found)


def _is_names(kinds: Any) -> bool:
    return isinstance(kinds, list) and all(isinstance(kind, str) for kind in kinds)


def is_text(schema: Any) -> bool:
    """Return whether a value can only be a string. Values that no schema describes are strings."""
    return schema is None or types_of(schema) == {"string"}


def typed_json(text: str, schema: Any) -> str:
    """Return a value as JSON: of one of the schema's types if the text can be one, else a string.
    If the schema allows strings, too, only objects, lists and null are not strings."""
    return json.dumps(_typed(text, types_of(schema)), ensure_ascii=False)


def _typed(text: str, kinds: Set[str]) -> Any:
    stripped = text.strip()
    word = stripped.lower()
    if word in _WORDS:
        value = _WORDS[word]
        is_allowed = _is_allowed(value, kinds)
        return value if is_allowed and not (isinstance(value, bool) and "string" in kinds) else text
    if "string" in kinds and not stripped.startswith(("{", "[")):
        return text
    try:
        value = parse_model_json(stripped)
    except ValueError:
        return text
    is_finite = not isinstance(value, float) or math.isfinite(value)
    return value if is_finite and _is_allowed(value, kinds) else text


def _is_allowed(value: Any, kinds: Set[str]) -> bool:
    kind = _TYPES_OF[type(value)]
    return not kinds or kind in kinds or (kind in ("integer", "number") and "number" in kinds)
