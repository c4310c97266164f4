"""A JSON schema whose objects have no properties beyond those that it names."""

from typing import Any

SCHEMAS = frozenset({"properties", "$defs", "definitions"})
"""Keywords of which each value is a schema of its own."""

ALTERNATIVES = frozenset({"anyOf", "oneOf"})

OPEN_KEYWORDS = frozenset(
    {"additionalProperties", "unevaluatedProperties", "patternProperties", "propertyNames",
     "allOf", "anyOf", "oneOf", "$ref", "if", "dependentSchemas"}
)  # fmt: skip
"""Beside ``properties``: others than those named there may be meant."""


def forbid_extra_properties(schema: Any) -> Any:
    """``additionalProperties: false`` where an object's schema names properties and says nothing
    of others. What is combined (``allOf``, and definitions that may be parts of one) stays as it
    is."""
    return _closed(schema, has_parts="allOf" in str(schema))


def _closed(schema: Any, has_parts: bool) -> Any:
    if not isinstance(schema, dict):
        return schema
    found: dict[str, Any] = {}
    is_combined = "properties" in schema and not OPEN_KEYWORDS.isdisjoint(schema)
    for keyword, value in schema.items():
        if keyword in SCHEMAS and isinstance(value, dict):
            keeps = has_parts and keyword != "properties"
            inner = value if keeps else {k: _closed(v, has_parts) for k, v in value.items()}
            found[keyword] = inner
        elif keyword in ALTERNATIVES and isinstance(value, list) and not is_combined:
            found[keyword] = [_closed(each, has_parts) for each in value]
        elif keyword == "items":
            found[keyword] = _closed(value, has_parts)
        elif keyword == "prefixItems" and isinstance(value, list):
            found[keyword] = [_closed(each, has_parts) for each in value]
        else:
            found[keyword] = value
    if "properties" in schema and OPEN_KEYWORDS.isdisjoint(schema):
        found["additionalProperties"] = False
    return found
