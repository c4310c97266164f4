"""OpenAPI schemas of request bodies, made from the pydantic classes that parse them.

If a class validates a field with code, pydantic can't derive the field's schema. Such schemas are
in :data:`FIELD_SCHEMAS`, and a test reports missing ones.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from router.openai.schema.completion import MAX_PROMPTS
from router.openai.schema.generation_body import MAX_STOP_CHARACTERS, MAX_STOPS
from router.openai.schema.message import MAX_TOOL_CALLS

Schema = dict[str, Any]

REF = "#/components/schemas/"
TEXT: Schema = {"type": "string"}
NULL: Schema = {"type": "null"}
STOP: Schema = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARACTERS}
TOKEN_IDS: Schema = {"type": "array", "items": {"type": "integer"}, "minItems": 1}
PROMPT: Schema = {"type": "string", "minLength": 1}


def _object(required: Mapping[str, Schema], optional: Mapping[str, Schema] | None = None) -> Schema:
    return {
        "type": "object",
        "properties": {**required, **(optional or {})},
        "required": list(required),
        "additionalProperties": False,
    }


def _const(value: str) -> Schema:
    return {"type": "string", "const": value}


def _any(*forms: Schema) -> Schema:
    return {"anyOf": list(forms)}


def _list_of(item: Schema, **bounds: int) -> Schema:
    return {"type": "array", "items": item, **bounds}


CACHE_CONTROL = _object(
    {"type": _const("ephemeral")}, {"ttl": _any({"enum": ["5m", "1h"], "type": "string"}, NULL)}
)
CACHE_CONTROL_FIELD = {"cache_control": _any(CACHE_CONTROL, NULL)}
PARTS = _any(
    _object({"type": _const("text"), "text": TEXT}, CACHE_CONTROL_FIELD),
    _object({"type": _const("refusal"), "refusal": TEXT}, CACHE_CONTROL_FIELD),
)
NAME: Schema = {"type": "string", "pattern": r"^[a-zA-Z0-9_.-]{1,128}$"}
ANYTHING: Schema = {"type": "object", "additionalProperties": True}
CALL: Schema = {
    "type": "object",
    "properties": {
        "id": _any(TEXT, NULL),
        "type": _const("function"),
        "function": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "minLength": 1},
                "arguments": _any(TEXT, ANYTHING),
            },
            "required": ["name", "arguments"],
        },
    },
    "required": ["function"],
}
TOOL = _object(
    {
        "type": _const("function"),
        "function": _object(
            {"name": NAME},
            {
                "description": _any(TEXT, NULL),
                "parameters": _any(ANYTHING, NULL),
                "strict": _any({"type": "boolean"}, NULL),
            },
        ),
    }
)
NAMED_TOOL: Schema = {
    "type": "object",
    "properties": {
        "type": _const("function"),
        "function": {"type": "object", "properties": {"name": NAME}, "required": ["name"]},
    },
    "required": ["type", "function"],
}
ALLOWED_TOOLS: Schema = {
    "type": "object",
    "properties": {
        "type": _const("allowed_tools"),
        "allowed_tools": {
            "type": "object",
            "properties": {
                "mode": {"type": "string", "enum": ["auto", "required"]},
                "tools": _list_of(NAMED_TOOL, minItems=1),
            },
            "required": ["mode", "tools"],
        },
    },
    "required": ["type", "allowed_tools"],
}
PREDICTION: Schema = {
    "type": "object",
    "properties": {"type": _const("content"), "content": _any(TEXT, _list_of({}))},
    "required": ["type", "content"],
}
CONTENT = _any(TEXT, _list_of(PARTS), NULL)

UNSUPPORTED_FIELDS = (
    "prompt_cache_options", "audio", "web_search_options", "moderation", "functions",
    "function_call", "chat_template",
)  # fmt: skip
"""Fields of other servers' APIs for which only null is accepted."""

FIELD_SCHEMAS: Mapping[str, Schema] = {
    **{name: {**NULL, "description": "Not supported; only null."} for name in UNSUPPORTED_FIELDS},
    "annotations": _any(_list_of({}, maxItems=0), NULL),
    "cache_control": _any(CACHE_CONTROL, NULL),
    "content": CONTENT,
    "modalities": _any({"type": "array", "const": ["text"]}, NULL),
    "prediction": _any(PREDICTION, NULL),
    "prompt_cache_retention": _any(_const("in_memory"), NULL),
    "service_tier": _any({"type": "string", "enum": ["auto", "default"]}, NULL),
    "stop": _any(STOP, _list_of(STOP, maxItems=MAX_STOPS), NULL),
    "store": _any({"type": "boolean", "const": False}, NULL),
    "suffix": _any(_const(""), NULL),
    "tool_calls": _any(_list_of(CALL, maxItems=MAX_TOOL_CALLS), NULL),
    "tool_choice": _any(
        {"type": "string", "enum": ["none", "auto", "required"]}, NAMED_TOOL, ALLOWED_TOOLS, NULL
    ),
    "verbosity": _any(_const("medium"), NULL),
}
"""Schemas by field name, in place of those that pydantic derives."""

PROMPTS = _any(
    PROMPT,
    _list_of(PROMPT, minItems=1, maxItems=MAX_PROMPTS),
    TOKEN_IDS,
    _list_of(TOKEN_IDS, minItems=1, maxItems=MAX_PROMPTS),
)
CLASS_FIELD_SCHEMAS: Mapping[tuple[str, str], Schema] = {("CompletionBody", "prompt"): PROMPTS}
"""Schemas by class and field name, for field names that have another schema in another class."""


def request_schemas(classes: Sequence[type[BaseModel]]) -> dict[str, Schema]:
    """Return the JSON schemas of ``classes`` and of the models nested in them, by class name."""
    found = derived_schemas(classes)
    return {name: _complete_schema(name, schema) for name, schema in found.items()}


def derived_schemas(classes: Sequence[type[BaseModel]]) -> dict[str, Schema]:
    """Return the JSON schemas that pydantic derives for ``classes`` and for the models nested in
    them, by class name."""
    found: dict[str, Schema] = {}
    for each in classes:
        schema = each.model_json_schema(ref_template=REF + "{model}")
        found |= schema.pop("$defs", {})
        found[each.__name__] = schema
    return found


def _complete_schema(owner: str, schema: Schema) -> Schema:
    properties = {
        name: _property(owner, name, form) for name, form in schema.get("properties", {}).items()
    }
    return {**_without_titles(schema), "properties": properties}


def _property(owner: str, name: str, form: Schema) -> Schema:
    known = CLASS_FIELD_SCHEMAS.get((owner, name)) or FIELD_SCHEMAS.get(name)
    if name == "tools":
        return _any(_list_of(TOOL, maxItems=_bound(form)), NULL)
    return known if known is not None else _without_titles(form)


def _bound(form: Schema) -> int:
    """Return the ``maxItems`` of a list that may be null."""
    return next(int(each["maxItems"]) for each in form["anyOf"] if "maxItems" in each)


def _without_titles(form: Schema) -> Schema:
    return {key: value for key, value in form.items() if key != "title"}
