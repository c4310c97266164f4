"""OpenAPI schemas of the request fields of the Responses API that are validated by our own code,
from which pydantic can't derive schemas."""

from collections.abc import Mapping

from router.api_document.schema_forms import ANYTHING, NULL, TEXT, Schema, any_of, const, list_of
from router.responses.schema import MAX_ITEMS
from router.serving.schema.tool import MAX_TOOLS

RESPONSES_CLASSES = ("ResponsesBody", "InputTokensBody")

ITEM: Schema = {
    **ANYTHING,
    "description": (
        "A message, reasoning, a call, the output of a call, or a reference to a stored item; "
        "without `type`, an object with a `role` is a message."
    ),
}
TOOL: Schema = {
    "type": "object",
    "properties": {"type": TEXT},
    "required": ["type"],
    "description": "A tool of type `function`, `custom` or `namespace`. Hosted tools are ignored.",
}
TOOL_CHOICE: Schema = {
    "type": "object",
    "properties": {"type": {"type": "string", "enum": ["function", "custom", "allowed_tools"]}},
    "required": ["type"],
}
UNSUPPORTED: Schema = {**NULL, "description": "Not supported; only null."}

RESPONSES_FIELDS: Mapping[str, Schema] = {
    "input": any_of(TEXT, list_of(ITEM, maxItems=MAX_ITEMS), NULL),
    "tools": any_of(list_of(TOOL, maxItems=MAX_TOOLS), NULL),
    "tool_choice": any_of(
        {"type": "string", "enum": ["none", "auto", "required"]}, TOOL_CHOICE, NULL
    ),
    "truncation": any_of(const("disabled"), NULL),
    "store": any_of({"type": "boolean"}, NULL),
    "service_tier": any_of(TEXT, NULL),
    "prompt_cache_retention": any_of({"type": "string", "enum": ["in_memory", "24h"]}, NULL),
    "prompt_cache_options": any_of(ANYTHING, NULL),
    "prompt": UNSUPPORTED,
    "conversation": UNSUPPORTED,
    "personality": UNSUPPORTED,
    "context_management": UNSUPPORTED,
    "moderation": UNSUPPORTED,
}
