"""Parses the responses of ``/v1/responses``, and checks them against the types of OpenAI's Python
client."""

import json
from collections.abc import Mapping
from typing import Any

import httpx
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from baton.core.ids import TenantId
from baton.errors import Unavailable
from router.responses.stored_response import (
    EncodedResponse,
    StoredResponse,
    encode_stored,
    read_encoded,
)
from router.serving.memory_budgets import StoredBytesBudget, StoredBytesShare
from tests.router_harness import RESPOND

__all__ = [
    "RESPOND",
    "DictStore",
    "FailingStore",
    "enough_memory",
    "response_events",
    "response_of",
    "summarize",
    "unknown_fields",
]

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
EXTENSIONS = {"obfuscation", "store", "presence_penalty", "frequency_penalty", "bytes"}
"""Fields of OpenAI's answers or of Open Responses (``bytes`` in the logprobs of events) that the
types of OpenAI's client lack."""


class DictStore:
    def __init__(self) -> None:
        self.stored: dict[tuple[TenantId, str], StoredResponse] = {}

    async def put(self, tenant: TenantId, stored: StoredResponse) -> None:
        self.stored[tenant, stored.id] = stored

    async def replace(self, tenant: TenantId, stored: StoredResponse) -> bool:
        is_known = (tenant, stored.id) in self.stored
        if is_known:
            await self.put(tenant, stored)
        return is_known

    async def get(self, tenant: TenantId, response_id: str) -> EncodedResponse | None:
        stored = self.stored.get((tenant, response_id))
        return read_encoded(encode_stored(stored), response_id) if stored is not None else None

    async def size_bytes(self, tenant: TenantId, response_id: str) -> int:
        stored = self.stored.get((tenant, response_id))
        return len(encode_stored(stored)) if stored is not None else 0

    async def delete(self, tenant: TenantId, response_id: str) -> bool:
        return self.stored.pop((tenant, response_id), None) is not None


class FailingStore(DictStore):
    async def put(self, tenant: TenantId, stored: StoredResponse) -> None:
        raise Unavailable("the response store is unavailable")


def enough_memory() -> StoredBytesShare:
    """Return the share of a request that has the memory for stored responses for itself."""
    return StoredBytesBudget().new_share(TenantId("reader"), 1.0, shared=False)


def response_of(answer: httpx.Response) -> dict[str, Any]:
    """Check that the HTTP response has status 200, and that its body is a valid response object of
    the Responses API. Return that object."""
    assert answer.status_code == 200, answer.text
    data: dict[str, Any] = answer.json()
    check(Response.model_validate(data, strict=True))
    return data


def response_events(answer: httpx.Response) -> list[dict[str, Any]]:
    """Check the framing, types and sequence numbers of a stream's events, and return the events."""
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    *blocks, end = answer.text.split("\n\n")
    assert end == ""
    blocks = [block for block in blocks if not block.startswith(": ")]
    events: list[dict[str, Any]] = []
    for number, block in enumerate(blocks):
        kind, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert kind == f"event: {event['type']}"
        assert event["sequence_number"] == number
        check(EVENT.validate_python(event, strict=True))
        events.append(event)
    return events


def check(value: BaseModel) -> None:
    assert unknown_fields(value) <= EXTENSIONS


def unknown_fields(value: Any) -> set[str]:
    """Return the names of all fields, at any depth, that the types of the client lack."""
    if isinstance(value, BaseModel):
        found = set(value.model_extra or ())
        for name in type(value).model_fields:
            found |= unknown_fields(getattr(value, name))
        return found
    return set().union(*map(unknown_fields, value)) if isinstance(value, list) else set()


def summarize(events: list[dict[str, Any]]) -> list[Any]:
    """Summarize each event: its type without ``response.``, its output index, and its delta, text,
    part, item or status. Consecutive deltas of an item are joined."""
    lines: list[Any] = []
    for event in events:
        kind = event["type"].removeprefix("response.")
        line = (kind, *_place(event), *_content(event))
        joins = bool(lines) and kind.endswith(".delta") and lines[-1][:2] == line[:2]
        if joins:
            lines[-1] = (*line[:-1], lines[-1][-1] + line[-1])
        else:
            lines.append(line)
    return lines


def _place(event: Mapping[str, Any]) -> tuple[Any, ...]:
    return (event["output_index"],) if "output_index" in event else ()


def _content(event: Mapping[str, Any]) -> tuple[Any, ...]:
    for name in ("delta", "text", "arguments", "input"):
        if name in event:
            return (event[name],)
    if "part" in event:
        return (event["part"]["type"], event["part"]["text"])
    if "item" in event:
        return (event["item"]["type"], event["item"].get("status"))
    return (event["response"]["status"],)
