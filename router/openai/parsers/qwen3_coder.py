"""A tool call as Qwen3-Coder writes it.

<function=f>
<parameter=x>
1
</parameter>
</function>
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from router.openai.parsers.model_json import parse_model_json

FUNCTION = "<function="

Schemas = Mapping[str, Mapping[str, Any]]
"""JSON schemas of parameters, by function name."""

_CALL = re.compile(r"\s*<function=([^<>\s]+)>(.*)", re.DOTALL)
_PARAMETER = re.compile(
    r"<parameter=([^<>\s]+)>(.*?)(?:</parameter>|(?=<parameter=)|(?=</function>)|\Z)", re.DOTALL
)


def parse_xml_call(raw: str, schemas: Schemas) -> tuple[str, str] | None:
    """Return the call's name, and its arguments as JSON; None if the text is not a call."""
    call = _CALL.match(raw)
    if call is None:
        return None
    properties = schemas.get(call[1], {}).get("properties")
    properties = properties if isinstance(properties, dict) else {}
    arguments = {
        name: _parse_typed_value(value.removeprefix("\n").removesuffix("\n"), properties.get(name))
        for name, value in _PARAMETER.findall(call[2])
    }
    return call[1], json.dumps(arguments, ensure_ascii=False)


def _parse_typed_value(text: str, schema: Any) -> Any:
    """Convert a value to its schema's type if possible; otherwise it stays a string."""
    kinds = schema.get("type", "string") if isinstance(schema, dict) else "string"
    if "string" in kinds:
        return text
    try:
        return parse_model_json(text.strip().lower() if kinds == "boolean" else text)
    except ValueError:
        return text
