"""Checks responses of the Responses API and the Messages API. Each check returns what is wrong, or
an empty string."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

Event = Mapping[str, Any]

TERMINAL_EVENTS = {"response.completed", "response.incomplete", "response.failed"}
ERROR_FIELDS = {"message", "type", "param", "code"}


def error_fault(data: bytes, *, is_anthropic: bool) -> str:
    """Return what is wrong with the fields of an error response, or an empty string."""
    body = json.loads(data)
    error = body.get("error") if isinstance(body, dict) else None
    if not isinstance(error, dict) or not isinstance(error.get("message"), str):
        return f"an error without a message: {data[:300]!r}"
    if not error["message"] or not isinstance(error.get("type"), str):
        return f"an error with an empty message or without a type: {data[:300]!r}"
    if is_anthropic:
        is_right = body["type"] == "error" and set(body) == {"type", "error", "request_id"}
        return "" if is_right and set(error) == {"type", "message"} else f"error {data[:300]!r}"
    return "" if set(body) == {"error"} and set(error) == ERROR_FIELDS else f"error {data[:300]!r}"


def parse_events(text: str) -> list[Event]:
    """Parse a stream in which the name of each event must be the ``type`` in its data. Raises
    ValueError if a name is wrong or the last event is incomplete."""
    *blocks, end = text.split("\n\n")
    if end:
        raise ValueError(f"the stream ends within an event: {end[-100:]!r}")
    events = []
    for block in blocks:
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        if name != f"event: {event['type']}":
            raise ValueError(f"the name in {name!r} is not the type of the event {data[:100]}")
        events.append(event)
    return events


# -- the Responses API ----------------------------------------------------------------------------


def response_stream_fault(events: Sequence[Event]) -> str:
    numbers = [event["sequence_number"] for event in events]
    if numbers != list(range(len(events))):
        return f"sequence numbers {numbers[:100]}"
    kinds = [event["type"] for event in events]
    if kinds[:2] != ["response.created", "response.in_progress"]:
        return f"the stream begins with {kinds[:2]}"
    terminal = [number for number, kind in enumerate(kinds) if kind in TERMINAL_EVENTS]
    if terminal != [len(events) - 1]:
        return f"terminal events at {terminal} of {len(events)}"
    final = events[-1]["response"]
    if f"response.{final['status']}" != kinds[-1]:
        return f"{kinds[-1]} with status {final['status']}"
    return _items_fault(events[2:-1], final)


def _items_fault(events: Sequence[Event], final: Mapping[str, Any]) -> str:
    """Check that output items are opened and closed one after the other, and that the final
    response contains exactly these items."""
    done: list[Mapping[str, Any]] = []
    open_id, pieces = "", ""
    for event in events:
        kind = event["type"].removeprefix("response.")
        if event["output_index"] != len(done):
            return f"{kind} of item {event['output_index']}, not of {len(done)}"
        if kind == "output_item.added":
            if open_id:
                return f"an item is added while {open_id} is open"
            open_id, pieces = event["item"]["id"], ""
        elif kind == "output_item.done":
            if event["item"]["id"] != open_id:
                return f"{event['item']['id']} is done, and {open_id!r} is open"
            done.append(event["item"])
            open_id = ""
        elif event["item_id"] != open_id:
            return f"{kind} for {event['item_id']}, and {open_id!r} is open"
        elif kind.endswith(".delta"):
            pieces += event["delta"]
        elif kind.endswith(("text.done", "arguments.done")) and pieces != _whole(event):
            return f"deltas {pieces!r} make {_whole(event)!r}"
    if final["status"] == "failed":
        return ""
    if open_id:
        return f"{open_id} is not done"
    return "" if done == final["output"] else "the final output differs from the items"


def _whole(event: Event) -> Any:
    return event["text"] if "text" in event else event["arguments"]


def response_fault(response: Mapping[str, Any]) -> str:
    """Return what is wrong with a response that was not streamed, or an empty string."""
    if response["status"] not in ("completed", "incomplete", "queued"):
        return f"status {response['status']}"
    is_empty = not response["output"]
    if is_empty == (response["status"] == "queued"):
        return ""
    return f"status {response['status']}, and the output is {response['output']}"


# -- the Messages API -----------------------------------------------------------------------------


def message_stream_fault(events: Sequence[Event]) -> str:
    kinds = [event["type"] for event in events if event["type"] != "ping"]
    if kinds[0] != "message_start" or kinds.count("message_start") != 1:
        return f"the stream begins with {kinds[:3]}"
    if kinds[-1] == "error":
        return "" if kinds.count("error") == 1 else "more than one error"
    if kinds[-2:] != ["message_delta", "message_stop"]:
        return f"the stream ends with {kinds[-2:]}"
    num_ends = sum(kind in ("message_delta", "message_stop", "error") for kind in kinds)
    if num_ends != 2:
        return f"{num_ends} events of an end"
    return _blocks_fault([each for each in events if each["type"].startswith("content_block")])


def _blocks_fault(events: Sequence[Event]) -> str:
    """Check that content blocks are started and stopped one after the other."""
    num_blocks, is_open, kind = 0, False, ""
    for event in events:
        kind = event["type"].removeprefix("content_block_")
        if event["index"] != num_blocks or is_open == (kind == "start"):
            return f"{kind} of block {event['index']}; block {num_blocks} is open: {is_open}"
        if kind == "start":
            is_open = True
        elif kind == "stop":
            is_open = False
            num_blocks += 1
    return f"block {num_blocks} is not stopped" if is_open else ""
