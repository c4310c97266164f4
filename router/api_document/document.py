"""The OpenAPI document of all routes (``/openapi.json``)."""

import json
from functools import cache
from typing import Any

from baton.core.server_api import SERVER_ROUTES, ServerRoute
from router.api_document.anthropic_schemas import ANTHROPIC_SCHEMAS, MESSAGE_EVENTS
from router.api_document.batch_schemas import BATCH_RESPONSE_SCHEMAS, UPLOAD_BODY, page_parameters
from router.api_document.request_schemas import request_schemas
from router.api_document.response_schemas import RESPONSE_SCHEMAS, json_response, ref
from router.api_document.schema_forms import ANYTHING, TEXT, Schema
from router.api_document.stored_response_schemas import STORED_RESPONSE_SCHEMAS
from router.batches.schema import CreateBatchBody
from router.openai.schema import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from router.responses.routes import MAX_INPUT_ITEMS
from router.responses.schema import InputTokensBody, ResponsesBody

Operation = dict[str, Any]

REQUEST_MODELS = (
    ChatBody, CompletionBody, ResponsesBody, InputTokensBody, TokenizeBody, DetokenizeBody,
    CreateBatchBody,
)  # fmt: skip
USER_SECURITY: list[dict[str, list[str]]] = [{"key": []}]
ADMIN_SECURITY: list[dict[str, list[str]]] = [{"admin_key": []}]
NO_SECURITY: list[dict[str, list[str]]] = []

DESCRIPTION = (
    "OpenAI's and Anthropic's APIs for text, in front of separate prefill and decode workers. "
    "Every response has an `x-request-id` header (with your id, if you sent one). Responses of the "
    "model also have `x-baton-request-id`: pass that id to `baton explain` or "
    "`/admin/requests/{request_id}`. "
    "An unknown field that would change the answer is refused; others are ignored, and named in "
    "the response's header `x-baton-ignored-fields`."
)


def build_document(version: str) -> dict[str, Any]:
    return {
        "openapi": "3.1.0",
        "info": {"title": "Baton", "version": version, "description": DESCRIPTION},
        "paths": {
            **_answers(),
            **_stored_responses(),
            **_messages(),
            **_server_routes(),
            **_models(),
            **_batches(),
            **_operations(),
            **_admin(),
            **_adapters(),
        },
        "components": {
            "schemas": {
                **request_schemas(REQUEST_MODELS),
                **RESPONSE_SCHEMAS,
                **BATCH_RESPONSE_SCHEMAS,
                **STORED_RESPONSE_SCHEMAS,
                **ANTHROPIC_SCHEMAS,
            },
            "securitySchemes": {
                "key": _bearer("An API key. Needed only if API keys are configured."),
                "admin_key": _bearer(
                    "`admin_key`. If none is set, only local clients are allowed."
                ),
            },
        },
    }


@cache
def encode_document(version: str) -> bytes:
    """Encode the document as JSON, with an encoder that supports integers of more than 64 bits."""
    return json.dumps(build_document(version)).encode()


def _answers() -> dict[str, Any]:
    chat = _streaming_operation("Chat", "ChatBody", "ChatCompletion")
    completion = _streaming_operation("Complete a prompt", "CompletionBody", "Completion")
    response = _streaming_operation("Respond", "ResponsesBody", "Response", "ResponseEvents")
    count = _post_operation(
        "Count the tokens of a prompt", "InputTokensBody", "InputTokens", USER_SECURITY
    )
    return {
        "/v1/chat/completions": {"post": chat},
        "/v1/completions": {"post": completion},
        "/v1/responses": {"post": response},
        "/v1/responses/input_tokens": {"post": count},
        "/tokenize": {
            "post": _post_operation("Tokenize a text", "TokenizeBody", "Tokens", USER_SECURITY)
        },
        "/detokenize": {
            "post": _post_operation("Detokenize token ids", "DetokenizeBody", "Text", USER_SECURITY)
        },
    }


def _stored_responses() -> dict[str, Any]:
    one = _get_operation("A stored response", "Response", USER_SECURITY)
    stream = {"name": "stream", "in": "query", "required": False, "schema": {"const": "false"}}
    deleted = _get_operation("Delete a stored response", "DeletedResponse", USER_SECURITY)
    cancelled = _get_operation("Cancel a background response", "Response", USER_SECURITY)
    items = _get_operation("The input of a stored response", "InputItems", USER_SECURITY)
    for operation, parameters in (
        (one, [stream]),
        (deleted, []),
        (cancelled, []),
        (items, page_parameters(MAX_INPUT_ITEMS, "order")),
    ):
        operation["parameters"] = [_parameter("response_id", "path"), *parameters]
    return {
        "/v1/responses/{response_id}": {"get": one, "delete": deleted},
        "/v1/responses/{response_id}/cancel": {"post": cancelled},
        "/v1/responses/{response_id}/input_items": {"get": items},
    }


def _messages() -> dict[str, Any]:
    message = _streaming_operation("Message (Anthropic's API)", "MessagesBody", "AnsweredMessage")
    message["responses"]["200"]["content"]["text/event-stream"] = {"schema": MESSAGE_EVENTS}
    count = _post_operation(
        "Count the tokens of a message's prompt", "CountTokensBody", "TokenCount", USER_SECURITY
    )
    for operation in (message, count):
        for status in operation["responses"].keys() - {"200"}:
            operation["responses"][status]["content"]["application/json"]["schema"] = {
                "anyOf": [ref("MessageError"), ref("Error")]
            }
    return {
        "/v1/messages": {"post": message},
        "/v1/messages/count_tokens": {"post": count},
    }


def _server_routes() -> dict[str, Any]:
    """Return the routes that attached servers answer. Their bodies and answers are vLLM's."""
    return {
        path: {"post": _server_operation(f"Answered by an attached server: {route.name}", route)}
        for path, route in SERVER_ROUTES.items()
    }


def _server_operation(summary: str, route: ServerRoute) -> Operation:
    content_type = "multipart/form-data" if route.is_form else "application/json"
    model = {"type": "object", "properties": {"model": TEXT}, "additionalProperties": True}
    body = {"required": True, "content": {content_type: {"schema": model}}}
    operation = {**_get_operation(summary, "Health", USER_SECURITY), "requestBody": body}
    operation["responses"]["200"] = _content("The server's answer", "application/json", ANYTHING)
    return operation


def _models() -> dict[str, Any]:
    model = _get_operation("One model", "Model", USER_SECURITY)
    model["parameters"] = [_parameter("name", "path")]
    return {
        "/v1/models": {"get": _get_operation("The models", "Models", USER_SECURITY)},
        "/v1/models/{name}": {"get": model},
    }


def _batches() -> dict[str, Any]:
    upload = {**_get_operation("Upload a file", "File", USER_SECURITY), "requestBody": UPLOAD_BODY}
    files = _get_operation("The files", "Files", USER_SECURITY)
    files["parameters"] = page_parameters(10_000, "purpose", "order")
    content = _get_operation("A file's content", "File", USER_SECURITY)
    content["responses"]["200"] = _content("The file", "application/octet-stream", TEXT)
    batches = _get_operation("The batches", "Batches", USER_SECURITY)
    batches["parameters"] = page_parameters(100)
    one_file = _get_operation("One file", "File", USER_SECURITY)
    deleted = _get_operation("Delete a file", "DeletedFile", USER_SECURITY)
    one_batch = _get_operation("One batch", "Batch", USER_SECURITY)
    cancelled = _get_operation("Cancel a batch", "Batch", USER_SECURITY)
    for operation in (one_file, deleted, content):
        operation["parameters"] = [_parameter("file_id", "path")]
    for operation in (one_batch, cancelled):
        operation["parameters"] = [_parameter("batch_id", "path")]
    create = _post_operation(
        "Create a batch from a file", "CreateBatchBody", "Batch", USER_SECURITY
    )
    return {
        "/v1/files": {"post": upload, "get": files},
        "/v1/files/{file_id}": {"get": one_file, "delete": deleted},
        "/v1/files/{file_id}/content": {"get": content},
        "/v1/batches": {"post": create, "get": batches},
        "/v1/batches/{batch_id}": {"get": one_batch},
        "/v1/batches/{batch_id}/cancel": {"post": cancelled},
    }


def _operations() -> dict[str, Any]:
    metrics = _get_operation(
        "Metrics of this router; admins only, if API keys are required", "Health", ADMIN_SECURITY
    )
    metrics["responses"]["200"] = _content("For Prometheus", "text/plain", TEXT)
    described = _get_operation("This document", "Health", NO_SECURITY)
    described["responses"]["200"] = _content("OpenAPI 3.1", "application/json", {"type": "object"})
    ready = _get_operation("Whether the router accepts requests", "Ready", NO_SECURITY)
    ready["responses"]["503"] = json_response("Ready", "Not ready, with the reason")
    alive = _get_operation("Whether the process is alive", "Health", NO_SECURITY)
    load = _get_operation("The number of answers in progress", "Load", USER_SECURITY)
    asset = _page_operation("The console's files")
    file_name = {"type": "string", "pattern": r"^[A-Za-z0-9][A-Za-z0-9./-]*$"}
    asset["parameters"] = [{**_parameter("path", "path"), "schema": file_name}]
    return {
        "/health": {"get": alive},
        "/healthz": {"get": alive},
        "/ping": {"get": alive, "post": alive},
        "/ready": {"get": ready},
        "/load": {"get": load},
        "/version": {"get": _get_operation("The version", "Version", NO_SECURITY)},
        "/": {"get": _page_operation("The version, and links", "Server")},
        "/docs": {"get": _page_operation("The routes, for people")},
        "/ui": {"get": _page_operation("The console, for people")},
        "/ui/assets/{path}": {"get": asset},
        "/metrics": {"get": metrics},
        "/openapi.json": {"get": described},
    }


def _page_operation(summary: str, answer: str | None = None) -> Operation:
    """Return the operation of a route that responds with an HTML page or, if ``answer`` is given,
    also with JSON of that schema."""
    operation = _get_operation(summary, answer or "Health", NO_SECURITY)
    page = _content(summary, "text/html", TEXT)
    if answer is not None:
        page["content"] |= json_response(answer, summary)["content"]
    operation["responses"]["200"] = page
    return operation


def _admin() -> dict[str, Any]:
    explain = _get_operation("What happened to a request", "Explanation", ADMIN_SECURITY)
    explain["parameters"] = [_parameter("request_id", "path")]
    usage = _get_operation("What tenants used", "TenantsUsage", ADMIN_SECURITY)
    usage["parameters"] = [_parameter("since", "query")]
    state = _get_operation("What the console shows now", "ConsoleFrame", ADMIN_SECURITY)
    events = _get_operation("The same, once a second", "ConsoleFrame", ADMIN_SECURITY)
    no_reset = _get_operation("Drop cached prefixes: refused", "Error", ADMIN_SECURITY)
    no_reset["responses"] = {"501": json_response("Error", "It is not supported")} | {
        "default": json_response("Error", "An error")
    }
    frames = "Frames: first the whole state, then what changed"
    events["responses"]["200"] = _content(frames, "text/event-stream", TEXT)
    return {
        "/admin/state": {"get": state},
        "/admin/events": {"get": events},
        "/admin/requests/{request_id}": {"get": explain},
        "/admin/usage": {"get": usage},
        "/admin/pools": {
            "get": _get_operation("Sizes of the pools, and workers", "Pools", ADMIN_SECURITY)
        },
        "/admin/scale": {
            "post": _post_operation("Resize pools", "PoolSizes", "Pools", ADMIN_SECURITY)
        },
        "/admin/drain": {
            "post": _post_operation("Drain one worker", "WorkerName", "Pools", ADMIN_SECURITY)
        },
        "/reset_prefix_cache": {"post": no_reset},
        "/flush_cache": {"post": no_reset},
    }


def _adapters() -> dict[str, Any]:
    """Return the routes that load and unload LoRA adapters. Those with vLLM's names respond with
    text."""
    unload = _get_operation("Unload a LoRA adapter", "DeletedAdapter", ADMIN_SECURITY)
    unload["parameters"] = [_parameter("name", "path")]
    load_as_vllm, unload_as_vllm = (
        _post_operation(summary, body, "Health", ADMIN_SECURITY)
        for summary, body in (
            ("Load a LoRA adapter, as in vLLM", "VllmAdapterFolder"),
            ("Unload a LoRA adapter, as in vLLM", "VllmAdapterName"),
        )
    )
    for operation in (load_as_vllm, unload_as_vllm):
        operation["responses"]["200"] = _content(operation["summary"], "text/plain", TEXT)
    return {
        "/admin/adapters": {
            "get": _get_operation("LoRA adapters", "Adapters", ADMIN_SECURITY),
            "post": _post_operation(
                "Load a LoRA adapter", "AdapterFolder", "Adapter", ADMIN_SECURITY
            ),
        },
        "/admin/adapters/{name}": {"delete": unload},
        "/v1/load_lora_adapter": {"post": load_as_vllm},
        "/v1/unload_lora_adapter": {"post": unload_as_vllm},
    }


def _get_operation(summary: str, answer: str, security: list[dict[str, list[str]]]) -> Operation:
    responses = {
        "200": json_response(answer, summary),
        "default": json_response("Error", "An error"),
    }
    return {"summary": summary, "security": security, "responses": responses}


def _post_operation(
    summary: str, body: str, answer: str, security: list[dict[str, list[str]]]
) -> Operation:
    content = {"application/json": {"schema": ref(body)}}
    return {
        **_get_operation(summary, answer, security),
        "requestBody": {"required": True, "content": content},
    }


def _streaming_operation(summary: str, body: str, answer: str, events: str = "Events") -> Operation:
    operation = _post_operation(summary, body, answer, USER_SECURITY)
    operation["responses"]["200"]["content"]["text/event-stream"] = {"schema": ref(events)}
    refused = json_response("Error", "Too many requests or tokens, from one tenant or in total")
    headers = {
        name: {"description": f"{unit} to wait before a retry", "schema": {"type": "string"}}
        for name, unit in (("retry-after", "Seconds"), ("retry-after-ms", "Milliseconds"))
    }
    operation["responses"]["429"] = {**refused, "headers": headers}
    return operation


def _parameter(name: str, place: str) -> dict[str, Any]:
    return {"name": name, "in": place, "required": place == "path", "schema": TEXT}


def _content(description: str, media_type: str, schema: Schema) -> dict[str, Any]:
    return {"description": description, "content": {media_type: {"schema": schema}}}


def _bearer(description: str) -> dict[str, str]:
    return {"type": "http", "scheme": "bearer", "description": description}
