"""Builds requests to Anthropic's Messages API, and parses and checks the responses, for tests."""

import json
from typing import Any

import httpx

from tests.router_harness import USER

MESSAGES = "/v1/messages"
COUNT = "/v1/messages/count_tokens"

TOOL: dict[str, Any] = {
    "name": "f",
    "description": "Does it.",
    "input_schema": {
        "type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"],
    },
}  # fmt: skip
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'


def request(*messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"model": "demo", "max_tokens": 200, "messages": list(messages) or USER, **fields}


def user(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(content)}


def assistant(*content: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(content)}


def text(value: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": value, **fields}


def message_of(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 200, response.text
    message: dict[str, Any] = response.json()
    return message


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """Return the data of each event of a streamed response. The name of each event must be the
    ``type`` in its data."""
    assert response.headers["content-type"].startswith("text/event-stream"), response.text
    blocks = response.text.split("\n\n")
    assert blocks.pop() == ""
    found = []
    for block in blocks:
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        found.append(event)
    return found


def error_of(response: httpx.Response, status: int = 400) -> dict[str, str]:
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"type", "error", "request_id"} and body["type"] == "error"
    assert body["request_id"] == response.headers["request-id"]
    error: dict[str, str] = body["error"]
    assert set(error) == {"type", "message"}
    return error
