"""The OpenAPI document of all that the router answers (``/openapi.json``)."""

import json
from functools import cache
from typing import Any

from router.batches.bodies import BatchBody
from router.openapi.answers import ANSWERS, json_answer, ref
from router.openapi.batches import BATCH_ANSWERS, UPLOAD_BODY, page_parameters
from router.openapi.bodies import TEXT, Schema, schemas_of
from router.schema import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody

Operation = dict[str, Any]

BODIES = (ChatBody, CompletionBody, TokenizeBody, DetokenizeBody, BatchBody)
USER: list[dict[str, list[str]]] = [{"key": []}]
ADMIN: list[dict[str, list[str]]] = [{"admin_key": []}]
NOBODY: list[dict[str, list[str]]] = []

DESCRIPTION = (
    "OpenAI's API for text, in front of separate prefill and decode workers. Every answer carries "
    "`x-request-id` (yours, if you sent one), answers of the model `x-baton-request-id`, by which "
    "`baton explain` and `/admin/requests/{request_id}` know them. Unknown fields are refused."
)


def document(version: str) -> dict[str, Any]:
    return {
        "openapi": "3.1.0",
        "info": {"title": "Baton", "version": version, "description": DESCRIPTION},
        "paths": {**_answers(), **_models(), **_batches(), **_operations(), **_admin()},
        "components": {
            "schemas": {**schemas_of(BODIES), **ANSWERS, **BATCH_ANSWERS},
            "securitySchemes": {
                "key": _bearer("An API key. Without any configured, none is needed."),
                "admin_key": _bearer("`admin_key`. Without one, only this machine is let in."),
            },
        },
    }


@cache
def document_bytes(version: str) -> bytes:
    """As JSON, by the encoder that takes numbers of more than 64 bits."""
    return json.dumps(document(version)).encode()


def _answers() -> dict[str, Any]:
    chat = _streamed("Chat", "ChatBody", "ChatCompletion")
    completion = _streamed("Complete a prompt", "CompletionBody", "Completion")
    return {
        "/v1/chat/completions": {"post": chat},
        "/v1/completions": {"post": completion},
        "/tokenize": {"post": _asked("The ids of a text", "TokenizeBody", "Tokens", USER)},
        "/detokenize": {"post": _asked("The text of ids", "DetokenizeBody", "Text", USER)},
    }


def _models() -> dict[str, Any]:
    model = _told("One model", "Model", USER)
    model["parameters"] = [_parameter("name", "path")]
    return {
        "/v1/models": {"get": _told("The models", "Models", USER)},
        "/v1/models/{name}": {"get": model},
    }


def _batches() -> dict[str, Any]:
    upload = {**_told("Upload a file", "File", USER), "requestBody": UPLOAD_BODY}
    files = _told("The files", "Files", USER)
    files["parameters"] = page_parameters(10_000, "purpose", "order")
    content = _told("What is in a file", "File", USER)
    content["responses"]["200"] = _content("The file", "application/octet-stream", TEXT)
    batches = _told("The batches", "Batches", USER)
    batches["parameters"] = page_parameters(100)
    one_file = _told("One file", "File", USER)
    deleted = _told("Delete a file", "DeletedFile", USER)
    one_batch = _told("One batch", "Batch", USER)
    cancelled = _told("Cancel a batch", "Batch", USER)
    for operation in (one_file, deleted, content):
        operation["parameters"] = [_parameter("file_id", "path")]
    for operation in (one_batch, cancelled):
        operation["parameters"] = [_parameter("batch_id", "path")]
    create = _asked("Answer a file of requests", "BatchBody", "Batch", USER)
    return {
        "/v1/files": {"post": upload, "get": files},
        "/v1/files/{file_id}": {"get": one_file, "delete": deleted},
        "/v1/files/{file_id}/content": {"get": content},
        "/v1/batches": {"post": create, "get": batches},
        "/v1/batches/{batch_id}": {"get": one_batch},
        "/v1/batches/{batch_id}/cancel": {"post": cancelled},
    }


def _operations() -> dict[str, Any]:
    metrics = _told("Metrics of this router; where keys are asked for, for admins", "Health", ADMIN)
    metrics["responses"]["200"] = _content("For Prometheus", "text/plain", TEXT)
    described = _told("This document", "Health", NOBODY)
    described["responses"]["200"] = _content("OpenAPI 3.1", "application/json", {"type": "object"})
    ready = _told("Whether requests are taken", "Ready", NOBODY)
    ready["responses"]["503"] = json_answer("Ready", "Not now, with the reason")
    return {
        "/health": {"get": _told("Whether the process lives", "Health", NOBODY)},
        "/ready": {"get": ready},
        "/metrics": {"get": metrics},
        "/openapi.json": {"get": described},
    }


def _admin() -> dict[str, Any]:
    explain = _told("What became of a request", "Explanation", ADMIN)
    explain["parameters"] = [_parameter("request_id", "path")]
    usage = _told("What tenants used", "TenantsUsage", ADMIN)
    usage["parameters"] = [_parameter("since", "query")]
    return {
        "/admin/requests/{request_id}": {"get": explain},
        "/admin/usage": {"get": usage},
        "/admin/pools": {"get": _told("Sizes of the pools, and workers", "Pools", ADMIN)},
        "/admin/scale": {"post": _asked("Resize pools", "PoolSizes", "Pools", ADMIN)},
        "/admin/drain": {"post": _asked("Drain one worker", "WorkerName", "Pools", ADMIN)},
    }


def _told(summary: str, answer: str, security: list[dict[str, list[str]]]) -> Operation:
    responses = {"200": json_answer(answer, summary), "default": json_answer("Error", "An error")}
    return {"summary": summary, "security": security, "responses": responses}


def _asked(summary: str, body: str, answer: str, security: list[dict[str, list[str]]]) -> Operation:
    content = {"application/json": {"schema": ref(body)}}
    return {
        **_told(summary, answer, security),
        "requestBody": {"required": True, "content": content},
    }


def _streamed(summary: str, body: str, answer: str) -> Operation:
    operation = _asked(summary, body, answer, USER)
    operation["responses"]["200"]["content"]["text/event-stream"] = {"schema": ref("Events")}
    refused = json_answer("Error", "Too much at once, of this tenant or of all")
    seconds = {"description": "Seconds to wait", "schema": {"type": "string"}}
    operation["responses"]["429"] = {**refused, "headers": {"retry-after": seconds}}
    return operation


def _parameter(name: str, place: str) -> dict[str, Any]:
    return {"name": name, "in": place, "required": place == "path", "schema": TEXT}


def _content(description: str, media_type: str, schema: Schema) -> dict[str, Any]:
    return {"description": description, "content": {media_type: {"schema": schema}}}


def _bearer(description: str) -> dict[str, str]:
    return {"type": "http", "scheme": "bearer", "description": description}
