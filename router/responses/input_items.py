"""Completes input items to the form in which ``GET /v1/responses/ID/input_items`` lists them.

An item is stored with the fields that have a meaning, and with no others: a client could otherwise
store megabytes that are no part of any prompt."""

from collections.abc import Mapping, Sequence
from typing import Any

RESPONSE_PREFIX = "resp_"

ITEM_PREFIXES = {
    "message": "msg_",
    "reasoning": "rs_",
    "function_call": "fc_",
    "function_call_output": "fco_",
    "custom_tool_call": "ctc_",
    "custom_tool_call_output": "ctco_",
}


def make_item_id(kind: str, response_id: str, position: str) -> str:
    """Make the id of an item; ``position`` is unique within the response."""
    return (
        f"{ITEM_PREFIXES.get(kind, 'item_')}{response_id.removeprefix(RESPONSE_PREFIX)}_{position}"
    )


def response_id_of(item_id: str) -> str:
    """Return the id of the response that an item belongs to. The result has no meaning for an id
    that :func:`make_item_id` did not make."""
    return RESPONSE_PREFIX + item_id.partition("_")[2].rpartition("_")[0]


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
            text_type = "output_text" if item.get("role") == "assistant" else "input_text"
            completed[name] = _with_known_fields(item[name], part_type, text_type)
    if kind == "message":
        completed["content"] = _content_parts(completed)
    if kind not in STATUS_FREE_ITEMS:
        status = item.get("status")
        is_known = isinstance(status, str) and status in STATUSES
        completed["status"] = status if is_known else "completed"
    return completed


def _with_known_fields(value: Any, part_type: str | None, text_type: str) -> Any:
    """Return the value of a field. If it is a list of parts, they keep their texts; ``part_type``
    is the type of all parts, or None if each has its own. A part that is a string gets
    ``text_type``."""
    if not isinstance(value, list):
        return value
    parts = [{"type": text_type, "text": e} if isinstance(e, str) else e for e in value]
    return [_part(part, part_type or part["type"]) for part in parts]


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
