"""Generates random JSON values that follow the schemas of the OpenAPI document."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from router.api_document.document import build_document
from tests.fuzz.value_maker import TEXTS, ValueMaker

MAX_DEPTH = 8
REFERENCE_PREFIX = "#/components/schemas/"


class SchemaValues(ValueMaker):
    """Generates values, most of which match their schema. Ranges and patterns are ignored, so some
    values are out of bounds."""

    def __init__(self, rng: np.random.Generator) -> None:
        super().__init__(rng)
        self._schemas: Mapping[str, Any] = build_document("1")["components"]["schemas"]

    def fields(self, name: str) -> Mapping[str, Any]:
        """Return the schemas of the fields of the object whose schema is called ``name``."""
        properties: Mapping[str, Any] = self._schemas[name]["properties"]
        return properties

    def of_schema(self, schema: Any, depth: int = 0) -> Any:
        """Return a value that matches ``schema`` in most cases."""
        if not isinstance(schema, dict) or depth > MAX_DEPTH:
            return self.value(depth)
        if "$ref" in schema:
            name = schema["$ref"].removeprefix(REFERENCE_PREFIX)
            return self.of_schema(self._schemas[name], depth + 1)
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return self._one(schema["enum"])
        for union in ("anyOf", "oneOf", "allOf"):
            if union in schema:
                return self.of_schema(self._one(schema[union]), depth + 1)
        kind = schema.get("type", "")
        return self._of_type(self._one(kind) if isinstance(kind, list) else kind, schema, depth)

    def _of_type(self, kind: str, schema: Mapping[str, Any], depth: int) -> Any:
        match kind:
            case "object":
                return self._object(schema, depth)
            case "array":
                each = schema.get("items", {})
                return [self.of_schema(each, depth + 1) for _ in range(self._below(4))]
            case "string":
                return self._one(TEXTS)
            case "integer":
                return self._one((0, 1, 2, 5, 20, 100))
            case "number":
                return self._one((0, 0.5, 1, 1.5, -1, 2))
            case "boolean":
                return self._chance(0.5)
            case "null":
                return None
        return self.value(depth)

    def _object(self, schema: Mapping[str, Any], depth: int) -> dict[str, Any]:
        required = schema.get("required", ())
        made = {
            name: self.of_schema(form, depth + 1)
            for name, form in schema.get("properties", {}).items()
            if self._chance(0.95 if name in required else 0.4)
        }
        if schema.get("additionalProperties") is not False and self._chance(0.3):
            made[self._one(TEXTS)] = self.value(depth + 1)
        return made
