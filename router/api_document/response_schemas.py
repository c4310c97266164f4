"""OpenAPI schemas of responses, in OpenAI's format."""

from typing import Any

from baton.core.worker_kinds import WORKER_KINDS
from router.api_document.schema_forms import ANYTHING, NULL, REF, TEXT, Schema

INTEGER: Schema = {"type": "integer"}
NUMBER: Schema = {"type": "number"}
BOOLEAN: Schema = {"type": "boolean"}


def ref(name: str) -> Schema:
    return {"$ref": REF + name}


def _list_of(item: Schema) -> Schema:
    return {"type": "array", "items": item}


def _or_null(form: Schema) -> Schema:
    return {"anyOf": [form, NULL]}


def extensible_object(**required: Schema) -> Schema:
    """Return the schema of an object that may have further properties, which clients ignore."""
    return {"type": "object", "properties": required, "required": list(required)}


def _const(value: str) -> Schema:
    return {"type": "string", "const": value}


USAGE = extensible_object(
    prompt_tokens=INTEGER,
    completion_tokens=INTEGER,
    total_tokens=INTEGER,
    prompt_tokens_details=extensible_object(cached_tokens=INTEGER),
)
FINISH_REASON: Schema = {"type": "string", "enum": ["stop", "length", "tool_calls"]}
CHAT_CHOICE = extensible_object(
    index=INTEGER,
    message=extensible_object(role=_const("assistant"), content=_or_null(TEXT)),
    logprobs=_or_null(ANYTHING),
    finish_reason=FINISH_REASON,
)
COMPLETION_CHOICE = extensible_object(
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
    "ChatCompletion": extensible_object(
        id=TEXT,
        object=_const("chat.completion"),
        created=INTEGER,
        model=TEXT,
        choices=_list_of(CHAT_CHOICE),
        usage=ref("Usage"),
    ),
    "Completion": extensible_object(
        id=TEXT,
        object=_const("text_completion"),
        created=INTEGER,
        model=TEXT,
        choices=_list_of(COMPLETION_CHOICE),
        usage=ref("Usage"),
    ),
    "Response": extensible_object(
        id=TEXT,
        object=_const("response"),
        created_at=INTEGER,
        completed_at=_or_null(INTEGER),
        model=TEXT,
        status={"type": "string", "enum": RESPONSE_STATUSES},
        output=_list_of(extensible_object(id=TEXT, type=TEXT)),
        usage=_or_null(ref("ResponseUsage")),
        error=_or_null(extensible_object(code=TEXT, message=TEXT)),
        incomplete_details=_or_null(extensible_object(reason=TEXT)),
        previous_response_id=_or_null(TEXT),
        presence_penalty=NUMBER,
        frequency_penalty=NUMBER,
        store=BOOLEAN,
    ),
    "ResponseUsage": extensible_object(
        input_tokens=INTEGER,
        input_tokens_details=extensible_object(cached_tokens=INTEGER),
        output_tokens=INTEGER,
        output_tokens_details=extensible_object(reasoning_tokens=INTEGER),
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
    "InputTokens": extensible_object(
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
    "Tokens": extensible_object(count=INTEGER, max_model_len=INTEGER, tokens=_list_of(INTEGER)),
    "Text": extensible_object(prompt=TEXT),
    "Model": extensible_object(
        id=TEXT, object=_const("model"), created=INTEGER, owned_by=TEXT, max_model_len=INTEGER,
        type=_const("model"), display_name=TEXT, created_at=TEXT, capabilities=_list_of(TEXT),
        generation_defaults=extensible_object(
            temperature=NUMBER, top_p=NUMBER, top_k=INTEGER, min_p=NUMBER, repetition_penalty=NUMBER
        ),
    ),
    "Models": extensible_object(
        object=_const("list"), data=_list_of(ref("Model")), has_more=BOOLEAN, first_id=TEXT,
        last_id=TEXT,
    ),
    "Adapter": extensible_object(
        name=TEXT, model=TEXT, digest=TEXT, loaded_on=_list_of(TEXT),
        errors={"type": "object", "additionalProperties": TEXT},
    ),
    "Adapters": extensible_object(adapters=_list_of(ref("Adapter"))),
    "DeletedAdapter": extensible_object(name=TEXT, deleted=BOOLEAN),
    "Ready": extensible_object(ready=BOOLEAN),
    "Health": extensible_object(status=TEXT),
    "Load": extensible_object(server_load=INTEGER),
    "Version": extensible_object(version=TEXT),
    "Server": extensible_object(name=TEXT, version=TEXT, links=ANYTHING),
    "Pools": extensible_object(
        sizes={"type": "object", "additionalProperties": INTEGER}, workers=_list_of({})
    ),
    "ConsoleFrame": extensible_object(
        number=INTEGER, is_full=BOOLEAN, cluster=ANYTHING, tables=ANYTHING
    ),
    "Explanation": extensible_object(
        request_id=TEXT, finish_reason=TEXT, error=TEXT, prompt_tokens=INTEGER,
        completion_tokens=INTEGER, cached_tokens=INTEGER, kv_transfer_bytes=INTEGER,
    ),
    "TenantsUsage": extensible_object(since=TEXT, until=TEXT, complete=BOOLEAN),
    "PoolSizes": {
        "type": "object",
        "properties": {role.value: {"type": "integer"} for role in WORKER_KINDS},
        "additionalProperties": False,
        "minProperties": 1,
    },
    "WorkerName": {
        "type": "object",
        "properties": {"worker": TEXT},
        "required": ["worker"],
        "additionalProperties": False,
    },
    "AdapterFolder": {
        "type": "object",
        "properties": {"name": TEXT, "path": TEXT, "model": TEXT},
        "required": ["name", "path"],
        "additionalProperties": False,
    },
    "VllmAdapterFolder": {
        "type": "object",
        "properties": {"lora_name": TEXT, "lora_path": TEXT},
        "required": ["lora_name", "lora_path"],
        "additionalProperties": False,
    },
    "VllmAdapterName": {
        "type": "object",
        "properties": {"lora_name": TEXT},
        "required": ["lora_name"],
        "additionalProperties": False,
    },
}  # fmt: skip


def json_response(name: str, description: str) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": ref(name)}}}
