"""OpenAPI schemas of request bodies, made from the pydantic classes that parse them.

If a class validates a field with code, pydantic can't derive the field's schema. Such schemas are
in :data:`FIELD_SCHEMAS`, and a test reports missing ones.
"""

from collections.abc import Mapping, Sequence

from pydantic import BaseModel

from router.api_document.responses_fields import RESPONSES_CLASSES, RESPONSES_FIELDS
from router.api_document.schema_forms import (
    ANYTHING,
    NULL,
    REF,
    TEXT,
    Schema,
    any_of,
    const,
    list_of,
    object_of,
)
from router.openai.schema.completion import MAX_PROMPTS
from router.serving.schema.message import MAX_TOOL_CALLS
from router.serving.schema.sampling_fields import MAX_STOP_CHARACTERS, MAX_STOPS
from router.serving.schema.tool import MAX_TOOLS

STOP: Schema = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARACTERS}
TOKEN_IDS: Schema = {"type": "array", "items": {"type": "integer"}, "minItems": 1}
PROMPT: Schema = {"type": "string", "minLength": 1}


CACHE_CONTROL = object_of(
    {"type": const("ephemeral")}, {"ttl": any_of({"enum": ["5m", "1h"], "type": "string"}, NULL)}
)
CACHE_CONTROL_FIELD = {"cache_control": any_of(CACHE_CONTROL, NULL)}
PARTS = any_of(
    object_of({"type": const("text"), "text": TEXT}, CACHE_CONTROL_FIELD),
    object_of({"type": const("refusal"), "refusal": TEXT}, CACHE_CONTROL_FIELD),
)
NAME: Schema = {"type": "string", "pattern": r"^[a-zA-Z0-9_.-]{1,128}$"}
CALL: Schema = {
    "type": "object",
    "properties": {
        "id": any_of(TEXT, NULL),
        "type": const("function"),
        "function": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "minLength": 1},
                "arguments": any_of(TEXT, ANYTHING),
            },
            "required": ["name", "arguments"],
        },
    },
    "required": ["function"],
}
TOOL = object_of(
    {
        "type": const("function"),
        "function": object_of(
            {"name": NAME},
            {
                "description": any_of(TEXT, NULL),
                "parameters": any_of(ANYTHING, NULL),
                "strict": any_of({"type": "boolean"}, NULL),
            },
        ),
    }
)
NAMED_TOOL: Schema = {
    "type": "object",
    "properties": {
        "type": const("function"),
        "function": {"type": "object", "properties": {"name": NAME}, "required": ["name"]},
    },
    "required": ["type", "function"],
}
ALLOWED_TOOLS: Schema = {
    "type": "object",
    "properties": {
        "type": const("allowed_tools"),
        "allowed_tools": {
            "type": "object",
            "properties": {
                "mode": {"type": "string", "enum": ["auto", "required"]},
                "tools": list_of(NAMED_TOOL, minItems=1, maxItems=MAX_TOOLS),
            },
            "required": ["mode", "tools"],
        },
    },
    "required": ["type", "allowed_tools"],
}
PREDICTION: Schema = {
    "type": "object",
    "properties": {"type": const("content"), "content": any_of(TEXT, list_of({}))},
    "required": ["type", "content"],
}
CONTENT = any_of(TEXT, list_of(PARTS), NULL)

UNSUPPORTED_FIELDS = (
    "audio", "web_search_options", "moderation", "functions",
    "function_call", "chat_template",
)  # fmt: skip
"""Known fields of which only the value null is accepted."""

FIELD_SCHEMAS: Mapping[str, Schema] = {
    **{name: {**NULL, "description": "Not supported; only null."} for name in UNSUPPORTED_FIELDS},
    "annotations": {**any_of(list_of({}), NULL), "description": "Ignored."},
    "cache_control": any_of(CACHE_CONTROL, NULL),
    "content": CONTENT,
    "modalities": any_of({"type": "array", "const": ["text"]}, NULL),
    "prediction": any_of(PREDICTION, NULL),
    "prompt_cache_options": {**any_of(ANYTHING, NULL), "description": "Ignored."},
    "stop": any_of(STOP, list_of(STOP, maxItems=MAX_STOPS), NULL),
    "suffix": any_of(const(""), NULL),
    "tool_calls": any_of(list_of(CALL, maxItems=MAX_TOOL_CALLS), NULL),
    "tool_choice": any_of(
        {"type": "string", "enum": ["none", "auto", "required"]}, NAMED_TOOL, ALLOWED_TOOLS, NULL
    ),
}
"""Schemas by field name, in place of those that pydantic derives."""

PROMPTS = any_of(
    PROMPT,
    list_of(PROMPT, minItems=1, maxItems=MAX_PROMPTS),
    TOKEN_IDS,
    list_of(TOKEN_IDS, minItems=1, maxItems=MAX_PROMPTS),
)
CLASS_FIELD_SCHEMAS: Mapping[tuple[str, str], Schema] = {
    ("CompletionBody", "prompt"): PROMPTS,
    **{
        (owner, name): form
        for owner in RESPONSES_CLASSES
        for name, form in RESPONSES_FIELDS.items()
    },
}
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
    if name == "tools" and known is None:
        return any_of(list_of(TOOL, maxItems=_bound(form)), NULL)
    return known if known is not None else _without_titles(form)


def _bound(form: Schema) -> int:
    """Return the ``maxItems`` of a list that may be null."""
    return next(int(each["maxItems"]) for each in form["anyOf"] if "maxItems" in each)


def _without_titles(form: Schema) -> Schema:
    return {key: value for key, value in form.items() if key != "title"}
