"""Makes a JSON schema strict: its objects may have only the properties that it names."""

from typing import Any

SCHEMAS = frozenset({"properties", "$defs", "definitions"})
"""Keywords whose values map names to schemas."""

ALTERNATIVES = frozenset({"anyOf", "oneOf"})

OPEN_KEYWORDS = frozenset(
    {"additionalProperties", "unevaluatedProperties", "patternProperties", "propertyNames",
     "allOf", "anyOf", "oneOf", "$ref", "if", "dependentSchemas"}
)  # fmt: skip
"""Keywords other than ``properties`` that may allow further properties."""


def forbid_extra_properties(schema: Any) -> Any:
    """Return the schema with ``additionalProperties: false`` added where an object's schema names
    properties and does not say whether others are allowed. Combined schemas (``allOf``, and
    definitions that may be parts of an ``allOf``) are not changed."""
    return _closed(schema, has_parts="allOf" in str(schema))


def _closed(schema: Any, has_parts: bool) -> Any:
    if not isinstance(schema, dict):
        return schema
    result: dict[str, Any] = {}
    is_combined = "properties" in schema and not OPEN_KEYWORDS.isdisjoint(schema)
    for keyword, value in schema.items():
        if keyword in SCHEMAS and isinstance(value, dict):
            keeps_value = has_parts and keyword != "properties"
            inner = value if keeps_value else {k: _closed(v, has_parts) for k, v in value.items()}
            result[keyword] = inner
        elif keyword in ALTERNATIVES and isinstance(value, list) and not is_combined:
            result[keyword] = [_closed(each, has_parts) for each in value]
        elif keyword == "items":
            result[keyword] = _closed(value, has_parts)
        elif keyword == "prefixItems" and isinstance(value, list):
            result[keyword] = [_closed(each, has_parts) for each in value]
        else:
            result[keyword] = value
    if "properties" in schema and OPEN_KEYWORDS.isdisjoint(schema):
        result["additionalProperties"] = False
    return result
