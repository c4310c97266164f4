"""OpenAPI schemas of Anthropic's Messages API."""

from router.anthropic.schema import CountTokensBody, MessagesBody
from router.api_document.request_schemas import derived_schemas
from router.api_document.response_schemas import INTEGER, extensible_object
from router.api_document.schema_forms import ANYTHING, NULL, TEXT, Schema


def _block(kind: str, **fields: Schema) -> Schema:
    return extensible_object(type={"type": "string", "const": kind}, **fields)


STOP_REASON: Schema = {
    "type": "string",
    "enum": [
        "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded",
    ],
}  # fmt: skip
USAGE = extensible_object(
    input_tokens=INTEGER,
    cache_creation_input_tokens=INTEGER,
    cache_read_input_tokens=INTEGER,
    output_tokens=INTEGER,
)
CONTENT_BLOCK: Schema = {
    "anyOf": [
        _block("text", text=TEXT),
        _block("thinking", thinking=TEXT, signature=TEXT),
        _block("tool_use", id=TEXT, name=TEXT, input=ANYTHING),
    ]
}
MESSAGE_EVENTS: Schema = {
    "type": "string",
    "description": (
        "Server-sent events in Anthropic's form: `event: TYPE`, `data: {…}` and an empty line. "
        "A stream that fails ends with the event `error`."
    ),
}

ANTHROPIC_SCHEMAS: dict[str, Schema] = {
    **derived_schemas([MessagesBody, CountTokensBody]),
    "AnsweredMessage": extensible_object(
        id=TEXT,
        type={"type": "string", "const": "message"},
        role={"type": "string", "const": "assistant"},
        model=TEXT,
        content={"type": "array", "items": CONTENT_BLOCK},
        stop_reason=STOP_REASON,
        stop_sequence={"anyOf": [TEXT, NULL]},
        usage=USAGE,
    ),
    "TokenCount": extensible_object(input_tokens=INTEGER),
    "MessageError": extensible_object(
        type={"type": "string", "const": "error"},
        error=extensible_object(type=TEXT, message=TEXT),
        request_id={"anyOf": [TEXT, NULL]},
    ),
}
