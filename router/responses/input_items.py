"""Completes input items to the form in which ``GET /v1/responses/ID/input_items`` lists them."""

from collections.abc import Mapping, Sequence
from typing import Any

from router.responses.item_ids import make_item_id

Item = Mapping[str, Any]

STATUS_FREE_ITEMS = frozenset({"custom_tool_call", "item_reference"})
"""Items that have no status in OpenAI's API."""


def to_items(given: str | list[Any] | None) -> list[Any]:
    """Return the input as items. A string becomes a user message."""
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": given}]
    return given or []


def complete_items(items: Sequence[Item], response_id: str) -> tuple[Item, ...]:
    """Return the items with missing fields added, such as types and ids. The items must have been
    read without an error."""
    return tuple(_complete(item, response_id, number) for number, item in enumerate(items))


def _complete(item: Item, response_id: str, number: int) -> Item:
    kind = item.get("type") or "message"
    item_id = item.get("id") or make_item_id(kind, response_id, f"in{number}")
    completed = {**item, "type": kind, "id": item_id}
    if kind == "message":
        completed["content"] = _content_parts(item)
    if kind not in STATUS_FREE_ITEMS:
        completed["status"] = _status(item)
    return completed


def _status(item: Item) -> str:
    """Return the item's status. It has no effect, so a client may send anything."""
    status = item.get("status")
    return status if isinstance(status, str) and status else "completed"


def _content_parts(message: Item) -> Any:
    content = message["content"]
    if not isinstance(content, str):
        return content
    if message["role"] == "assistant":
        return [{"type": "output_text", "text": content, "annotations": []}]
    return [{"type": "input_text", "text": content}]
