"""Completes input items to the form in which ``GET /v1/responses/ID/input_items`` lists them.

An item is stored with the fields that have a meaning, and with no others: a client could otherwise
store megabytes that are no part of any prompt."""

from collections.abc import Mapping, Sequence
from typing import Any

from router.responses.item_ids import make_item_id

Item = Mapping[str, Any]

STATUSES = frozenset({"in_progress", "completed", "incomplete"})
STATUS_FREE_ITEMS = frozenset({"custom_tool_call", "item_reference"})
"""Items that have no status in OpenAI's API."""

_CALL_FIELDS = ("call_id", "name", "namespace")
_FIELDS: Mapping[str, Sequence[str]] = {
    "message": ("role", "content"),
    "reasoning": ("summary", "content", "encrypted_content"),
    "function_call": (*_CALL_FIELDS, "arguments"),
    "custom_tool_call": (*_CALL_FIELDS, "input"),
    "function_call_output": ("call_id", "output"),
    "custom_tool_call_output": ("call_id", "output"),
}
"""The fields of each kind of item besides its type, id and status. Other kinds have no text for the
model."""

_REASONING_PARTS = {"summary": "summary_text", "content": "reasoning_text"}
"""The types of the parts of reasoning, which a client may leave out."""


def to_items(given: str | list[Any] | None) -> list[Any]:
    """Return the input as items. A string becomes a user message."""
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": given}]
    return given or []


def complete_items(items: Sequence[Item], response_id: str) -> tuple[Item, ...]:
    """Return the items with missing fields added, such as types and ids, and without fields that
    have no meaning. The items must have been read without an error."""
    return tuple(_complete(item, response_id, number) for number, item in enumerate(items))


def _complete(item: Item, response_id: str, number: int) -> Item:
    kind = item.get("type") or "message"
    item_id = item.get("id") or make_item_id(kind, response_id, f"in{number}")
    completed = {"type": kind, "id": item_id}
    for name in _FIELDS.get(kind, ()):
        if item.get(name) is not None:
            part_type = _REASONING_PARTS.get(name) if kind == "reasoning" else None
            completed[name] = _with_known_fields(item[name], part_type)
    if kind == "message":
        completed["content"] = _content_parts(completed)
    if kind not in STATUS_FREE_ITEMS:
        status = item.get("status")
        is_known = isinstance(status, str) and status in STATUSES
        completed["status"] = status if is_known else "completed"
    return completed


def _with_known_fields(value: Any, part_type: str | None) -> Any:
    """Return the value of a field. If it is a list of parts, they keep their texts; ``part_type``
    is the type of all parts, or None if each has its own."""
    if not isinstance(value, list):
        return value
    return [_part(part, part_type or part["type"]) for part in value]


def _part(part: Item, kind: str) -> Item:
    text = "refusal" if kind == "refusal" else "text"
    kept = {"type": kind, text: part[text]}
    return kept | {"annotations": []} if kind == "output_text" else kept


def _content_parts(message: Item) -> Any:
    content = message["content"]
    if not isinstance(content, str):
        return content
    if message["role"] == "assistant":
        return [{"type": "output_text", "text": content, "annotations": []}]
    return [{"type": "input_text", "text": content}]
