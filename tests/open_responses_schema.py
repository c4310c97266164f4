"""JSON schemas of the responses and stream events of Open Responses (openresponses.org): the fields
that its OpenAPI document requires, with their types."""

from collections.abc import Mapping
from typing import Any

from jsonschema import Draft202012Validator

Schema = Mapping[str, Any]

TEXT: Schema = {"type": "string"}
INTEGER: Schema = {"type": "integer"}
NUMBER: Schema = {"type": "number"}
BOOLEAN: Schema = {"type": "boolean"}
NULL: Schema = {"type": "null"}
OBJECT: Schema = {"type": "object"}


def nullable(schema: Schema) -> Schema:
    return {"anyOf": [schema, NULL]}


def one_of_words(*words: str) -> Schema:
    return {"enum": list(words)}


def list_of(item: Schema) -> Schema:
    return {"type": "array", "items": item}


def fields(optional: Mapping[str, Schema] | None = None, /, **required: Schema) -> Schema:
    properties = {**required, **(optional or {})}
    return {"type": "object", "properties": properties, "required": list(required)}


def tagged(tag: str, schemas: Mapping[str, Schema]) -> Schema:
    """Return the schema of a value whose field ``tag`` says which one of ``schemas`` it follows.
    The errors are then those of this one schema."""
    return {
        "type": "object",
        "required": [tag],
        "properties": {tag: {"enum": list(schemas)}},
        "allOf": [
            {"if": {"properties": {tag: {"const": value}}}, "then": schema}
            for value, schema in schemas.items()
        ],
    }


TOP_LOGPROB = {"token": TEXT, "logprob": NUMBER, "bytes": list_of(INTEGER)}
LOGPROBS = list_of(fields(**TOP_LOGPROB, top_logprobs=list_of(fields(**TOP_LOGPROB))))

ANNOTATION = tagged(
    "type",
    {"url_citation": fields(url=TEXT, start_index=INTEGER, end_index=INTEGER, title=TEXT)},
)
CONTENT = tagged(
    "type",
    {
        "output_text": fields({"logprobs": LOGPROBS}, text=TEXT, annotations=list_of(ANNOTATION)),
        "input_text": fields(text=TEXT),
        "text": fields(text=TEXT),
        "summary_text": fields(text=TEXT),
        "reasoning_text": fields(text=TEXT),
        "refusal": fields(refusal=TEXT),
    },
)
ITEM_STATUS = one_of_words("in_progress", "completed", "incomplete")
ITEM = tagged(
    "type",
    {
        "message": fields(
            id=TEXT,
            status=ITEM_STATUS,
            role=one_of_words("user", "assistant", "system", "developer"),
            content=list_of(CONTENT),
        ),
        "function_call": fields(
            id=TEXT, call_id=TEXT, name=TEXT, arguments=TEXT, status=ITEM_STATUS
        ),
        "function_call_output": fields(id=TEXT, call_id=TEXT, status=ITEM_STATUS),
        "reasoning": fields(
            {"content": list_of(CONTENT), "encrypted_content": TEXT},
            id=TEXT,
            summary=list_of(CONTENT),
        ),
    },
)

TOOL = tagged(
    "type",
    {
        "function": fields(
            name=TEXT,
            description=nullable(TEXT),
            parameters=nullable(OBJECT),
            strict=nullable(BOOLEAN),
        )
    },
)
TOOL_CHOICE_WORD = one_of_words("none", "auto", "required")
FUNCTION_CHOICE = fields({"name": TEXT}, type={"const": "function"})
TOOL_CHOICE: Schema = {
    "anyOf": [
        TOOL_CHOICE_WORD,
        FUNCTION_CHOICE,
        fields(
            type={"const": "allowed_tools"}, tools=list_of(FUNCTION_CHOICE), mode=TOOL_CHOICE_WORD
        ),
    ]
}
TEXT_FORMAT = tagged(
    "type",
    {
        "text": OBJECT,
        "json_object": OBJECT,
        # The document has a schema that is null; but an answer that repeats the client's schema is
        # what OpenAI's API, which the document describes, returns.
        "json_schema": fields(name=TEXT, description=nullable(TEXT), schema=OBJECT, strict=BOOLEAN),
    },
)
USAGE = fields(
    input_tokens=INTEGER,
    output_tokens=INTEGER,
    total_tokens=INTEGER,
    input_tokens_details=fields(cached_tokens=INTEGER),
    output_tokens_details=fields(reasoning_tokens=INTEGER),
)
RESPONSE = fields(
    id=TEXT,
    object={"const": "response"},
    created_at=INTEGER,
    completed_at=nullable(INTEGER),
    status=TEXT,
    incomplete_details=nullable(fields(reason=TEXT)),
    model=TEXT,
    previous_response_id=nullable(TEXT),
    instructions=nullable(TEXT),
    output=list_of(ITEM),
    error=nullable(fields(code=TEXT, message=TEXT)),
    tools=list_of(TOOL),
    tool_choice=TOOL_CHOICE,
    truncation=one_of_words("auto", "disabled"),
    parallel_tool_calls=BOOLEAN,
    text=fields({"verbosity": one_of_words("low", "medium", "high")}, format=TEXT_FORMAT),
    top_p=NUMBER,
    presence_penalty=NUMBER,
    frequency_penalty=NUMBER,
    top_logprobs=INTEGER,
    temperature=NUMBER,
    reasoning=nullable(
        fields(
            effort=nullable(one_of_words("none", "low", "medium", "high", "xhigh")),
            summary=nullable(one_of_words("concise", "detailed", "auto")),
        )
    ),
    user=nullable(TEXT),
    usage=nullable(USAGE),
    max_output_tokens=nullable(INTEGER),
    max_tool_calls=nullable(INTEGER),
    store=BOOLEAN,
    background=BOOLEAN,
    service_tier=TEXT,
    metadata=OBJECT,
    safety_identifier=nullable(TEXT),
    prompt_cache_key=nullable(TEXT),
)

OF_ITEM = {"item_id": TEXT, "output_index": INTEGER}
OF_CONTENT = {**OF_ITEM, "content_index": INTEGER}
OF_SUMMARY = {**OF_ITEM, "summary_index": INTEGER}
PADDING = {"obfuscation": TEXT}
EVENTS: Mapping[str, Schema] = {
    **{
        f"response.{state}": fields(response=RESPONSE)
        for state in ("created", "queued", "in_progress", "completed", "failed", "incomplete")
    },
    **{
        f"response.output_item.{verb}": fields(output_index=INTEGER, item=nullable(ITEM))
        for verb in ("added", "done")
    },
    **{
        f"response.content_part.{verb}": fields(**OF_CONTENT, part=CONTENT)
        for verb in ("added", "done")
    },
    **{
        f"response.reasoning_summary_part.{verb}": fields(**OF_SUMMARY, part=CONTENT)
        for verb in ("added", "done")
    },
    "response.output_text.delta": fields(
        {"logprobs": LOGPROBS, **PADDING}, **OF_CONTENT, delta=TEXT
    ),
    "response.output_text.done": fields({"logprobs": LOGPROBS}, **OF_CONTENT, text=TEXT),
    "response.reasoning_text.delta": fields(PADDING, **OF_CONTENT, delta=TEXT),
    "response.reasoning_text.done": fields(**OF_CONTENT, text=TEXT),
    "response.reasoning_summary_text.delta": fields(PADDING, **OF_SUMMARY, delta=TEXT),
    "response.reasoning_summary_text.done": fields(**OF_SUMMARY, text=TEXT),
    "response.function_call_arguments.delta": fields(PADDING, **OF_ITEM, delta=TEXT),
    "response.function_call_arguments.done": fields(**OF_ITEM, arguments=TEXT),
}
EVENT: Schema = {
    "allOf": [fields(type=TEXT, sequence_number=INTEGER), tagged("type", EVENTS)],
}

_RESPONSE_VALIDATOR = Draft202012Validator(RESPONSE)
_EVENT_VALIDATOR = Draft202012Validator(EVENT)


def response_errors(response: Any) -> list[str]:
    """Return where a response differs from Open Responses' schema; an empty list if nowhere."""
    return _errors(_RESPONSE_VALIDATOR, response)


def event_errors(event: Any) -> list[str]:
    """Return where a stream's event differs from Open Responses' schema; an empty list if
    nowhere."""
    return _errors(_EVENT_VALIDATOR, event)


def _errors(validator: Draft202012Validator, value: Any) -> list[str]:
    return sorted(
        f"{'.'.join(map(str, error.absolute_path))}: {error.message}"
        for error in validator.iter_errors(value)
    )
