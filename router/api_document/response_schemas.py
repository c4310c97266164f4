"""OpenAPI schemas of responses, in OpenAI's forms."""

from typing import Any

from router.api_document.schema_forms import ANYTHING, NULL, REF, TEXT, Schema

INTEGER: Schema = {"type": "integer"}
BOOLEAN: Schema = {"type": "boolean"}


def ref(name: str) -> Schema:
    return {"$ref": REF + name}


def _list_of(item: Schema) -> Schema:
    return {"type": "array", "items": item}


def _or_null(form: Schema) -> Schema:
    return {"anyOf": [form, NULL]}


def _extensible_object(**required: Schema) -> Schema:
    """Return the schema of an object that may have further properties, which clients ignore."""
    return {"type": "object", "properties": required, "required": list(required)}


def _const(value: str) -> Schema:
    return {"type": "string", "const": value}


USAGE = _extensible_object(
    prompt_tokens=INTEGER,
    completion_tokens=INTEGER,
    total_tokens=INTEGER,
    prompt_tokens_details=_extensible_object(cached_tokens=INTEGER),
)
FINISH_REASON: Schema = {"type": "string", "enum": ["stop", "length", "tool_calls"]}
CHAT_CHOICE = _extensible_object(
    index=INTEGER,
    message=_extensible_object(role=_const("assistant"), content=_or_null(TEXT)),
    logprobs=_or_null(ANYTHING),
    finish_reason=FINISH_REASON,
)
COMPLETION_CHOICE = _extensible_object(
    index=INTEGER, text=TEXT, logprobs=_or_null(ANYTHING), finish_reason=FINISH_REASON
)

RESPONSE_STATUSES = ["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]

RESPONSE_SCHEMAS: dict[str, Schema] = {
    "Error": {
        "type": "object",
        "properties": {
            "error": {
                "type": "object",
                "properties": {
                    "message": TEXT,
                    "type": TEXT,
                    "param": _or_null(TEXT),
                    "code": _or_null(TEXT),
                },
                "required": ["message", "type", "param", "code"],
                "additionalProperties": False,
            }
        },
        "required": ["error"],
        "additionalProperties": False,
    },
    "Usage": USAGE,
    "ChatCompletion": _extensible_object(
        id=TEXT,
        object=_const("chat.completion"),
        created=INTEGER,
        model=TEXT,
        choices=_list_of(CHAT_CHOICE),
        usage=ref("Usage"),
    ),
    "Completion": _extensible_object(
        id=TEXT,
        object=_const("text_completion"),
        created=INTEGER,
        model=TEXT,
        choices=_list_of(COMPLETION_CHOICE),
        usage=ref("Usage"),
    ),
    "Response": _extensible_object(
        id=TEXT,
        object=_const("response"),
        created_at=INTEGER,
        model=TEXT,
        status={"type": "string", "enum": RESPONSE_STATUSES},
        output=_list_of(_extensible_object(id=TEXT, type=TEXT)),
        usage=_or_null(ref("ResponseUsage")),
        error=_or_null(_extensible_object(code=TEXT, message=TEXT)),
        incomplete_details=_or_null(_extensible_object(reason=TEXT)),
        previous_response_id=_or_null(TEXT),
        store=BOOLEAN,
    ),
    "ResponseUsage": _extensible_object(
        input_tokens=INTEGER,
        input_tokens_details=_extensible_object(cached_tokens=INTEGER),
        output_tokens=INTEGER,
        output_tokens_details=_extensible_object(reasoning_tokens=INTEGER),
        total_tokens=INTEGER,
    ),
    "ResponseEvents": {
        "type": "string",
        "description": (
            "Server-sent events in OpenAI's format: lines `event: TYPE` and `data: {…}` with an "
            "empty line after them, numbered by `sequence_number`. The last one is "
            "`response.completed`, `response.incomplete` or `response.failed`, with the Response."
        ),
    },
    "InputTokens": _extensible_object(
        object=_const("response.input_tokens"), input_tokens=INTEGER
    ),
    "Events": {
        "type": "string",
        "description": (
            "Server-sent events: lines `data: {…}` with an empty line after each. They are chunks "
            "in OpenAI's format (`chat.completion.chunk` or `text_completion`), then, if "
            "`stream_options.include_usage` is true, a chunk with the usage, and `data: [DONE]` at "
            "the end. A stream that fails ends with an Error as its last event."
        ),
    },
    "Tokens": _extensible_object(count=INTEGER, max_model_len=INTEGER, tokens=_list_of(INTEGER)),
    "Text": _extensible_object(prompt=TEXT),
    "Model": _extensible_object(
        id=TEXT, object=_const("model"), created=INTEGER, owned_by=TEXT, max_model_len=INTEGER
    ),
    "Models": _extensible_object(object=_const("list"), data=_list_of(ref("Model"))),
    "Ready": _extensible_object(ready=BOOLEAN),
    "Health": _extensible_object(status=TEXT),
    "Load": _extensible_object(server_load=INTEGER),
    "Version": _extensible_object(version=TEXT),
    "Server": _extensible_object(name=TEXT, version=TEXT, links=ANYTHING),
    "Pools": _extensible_object(
        sizes={"type": "object", "additionalProperties": INTEGER}, workers=_list_of({})
    ),
    "Explanation": _extensible_object(
        request_id=TEXT, finish_reason=TEXT, error=TEXT, prompt_tokens=INTEGER,
        completion_tokens=INTEGER, cached_tokens=INTEGER, kv_transfer_bytes=INTEGER,
    ),
    "TenantsUsage": _extensible_object(since=TEXT, until=TEXT, complete=BOOLEAN),
    "PoolSizes": {
        "type": "object",
        "properties": {"prefill": {"type": "integer"}, "decode": {"type": "integer"}},
        "additionalProperties": False,
        "minProperties": 1,
    },
    "WorkerName": {
        "type": "object",
        "properties": {"worker": TEXT},
        "required": ["worker"],
        "additionalProperties": False,
    },
}  # fmt: skip


def json_response(name: str, description: str) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": ref(name)}}}
