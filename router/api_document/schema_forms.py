"""Building blocks of OpenAPI schemas."""

from collections.abc import Mapping
from typing import Any

Schema = dict[str, Any]

REF = "#/components/schemas/"
TEXT: Schema = {"type": "string"}
NULL: Schema = {"type": "null"}
ANYTHING: Schema = {"type": "object", "additionalProperties": True}


def object_of(
    required: Mapping[str, Schema], optional: Mapping[str, Schema] | None = None
) -> Schema:
    return {
        "type": "object",
        "properties": {**required, **(optional or {})},
        "required": list(required),
        "additionalProperties": False,
    }


def const(value: str) -> Schema:
    return {"type": "string", "const": value}


def any_of(*forms: Schema) -> Schema:
    return {"anyOf": list(forms)}


def list_of(item: Schema, **bounds: int) -> Schema:
    return {"type": "array", "items": item, **bounds}
