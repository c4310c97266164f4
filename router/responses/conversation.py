"""Finds the earlier turns of a conversation in the store."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from baton.core.ids import TenantId
from router.errors import ApiError
from router.responses.item_ids import response_id_of
from router.responses.response_status import is_unfinished
from router.responses.response_store import ResponseStore, StoredResponse

MAX_RESPONSES = 256
"""The maximum number of stored responses that one request may read. Each takes one call to the
store."""

PREVIOUS_ID = "previous_response_id"

Item = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Conversation:
    """The items of the earlier turns, the oldest first. ``size_bytes`` is their size as JSON."""

    items: Sequence[Item] = ()
    size_bytes: int = 0


class ConversationReader:
    """Reads the conversation of one request. ``store`` is None if responses are not stored.
    ``max_bytes`` bounds the total size of the items that the request takes from the store."""

    def __init__(self, store: ResponseStore | None, tenant: TenantId, max_bytes: int) -> None:
        self._store = store
        self._tenant = tenant
        self._max_bytes = max_bytes
        self._size_bytes = 0
        self._found: dict[str, Item] = {}
        """The items of the responses that were read, by their ids."""
        self._read_ids: set[str] = set()

    async def read(self, previous_id: str | None) -> Conversation:
        """Return the conversation up to and including the response ``previous_id``. Raises ApiError
        (400, 404) or Unavailable."""
        if previous_id is not None and self._store is None:
            raise _nothing_stored()
        turns: list[Sequence[Item]] = []
        next_id = previous_id
        while next_id is not None:
            stored = await self._get(next_id, PREVIOUS_ID)
            if stored is None:
                raise _previous_not_found(previous_id or next_id, next_id)
            if is_unfinished(stored):
                message = f"{PREVIOUS_ID}: the response {next_id!r} is not complete yet"
                raise ApiError(400, message, param=PREVIOUS_ID, code="invalid_value")
            turns.append(self._take_items(stored))
            self._add_size(turns[-1], PREVIOUS_ID)
            next_id = stored.previous_id
        items = [item for turn in reversed(turns) for item in turn]
        return Conversation(items, self._size_bytes)

    async def resolve_references(self, items: Sequence[Any]) -> list[Any]:
        """Return the items, with each reference replaced by the item that it names. Raises ApiError
        (400, 404) or Unavailable."""
        return [
            await self._resolve(item["id"], f"input[{number}].id") if _is_reference(item) else item
            for number, item in enumerate(items)
        ]

    async def _resolve(self, item_id: str, path: str) -> Item:
        response_id = response_id_of(item_id)
        if item_id not in self._found and response_id not in self._read_ids:
            stored = await self._get(response_id, path)
            if stored is not None:
                self._take_items(stored)
        item = self._found.get(item_id)
        if item is None:
            message = f"Item with id {item_id!r} not found."
            raise ApiError(404, message, param=path, code="item_not_found")
        self._add_size([item], path)
        return item

    async def _get(self, response_id: str, path: str) -> StoredResponse | None:
        if self._store is None:
            return None
        if len(self._read_ids) == MAX_RESPONSES:
            raise _too_long(f"the conversation has more than {MAX_RESPONSES} responses", path)
        self._read_ids.add(response_id)
        return await self._store.get(self._tenant, response_id)

    def _take_items(self, stored: StoredResponse) -> Sequence[Item]:
        items = [*stored.input_items, *stored.response["output"]]
        self._found |= {item["id"]: item for item in items}
        return items

    def _add_size(self, items: Sequence[Item], path: str) -> None:
        self._size_bytes += len(orjson.dumps(items))
        if self._size_bytes > self._max_bytes:
            raise _too_long(f"the conversation has more than {self._max_bytes} bytes", path)


def _is_reference(item: Any) -> bool:
    if not isinstance(item, dict) or not isinstance(item.get("id"), str):
        return False
    kind = item.get("type")
    return kind == "item_reference" or (kind is None and "role" not in item)


def _nothing_stored() -> ApiError:
    message = f"{PREVIOUS_ID}: is not supported, because no responses are stored here"
    return ApiError(404, message, param=PREVIOUS_ID, code="previous_response_not_found")


def _previous_not_found(previous_id: str, missing_id: str) -> ApiError:
    message = f"Previous response with id {previous_id!r} not found."
    if missing_id != previous_id:
        message = (
            f"The response with id {missing_id!r}, which {previous_id!r} continues, was not found."
        )
    return ApiError(404, message, param=PREVIOUS_ID, code="previous_response_not_found")


def _too_long(problem: str, path: str) -> ApiError:
    message = f"{path}: {problem}; begin a new one"
    return ApiError(400, message, param=path, code="context_length_exceeded")
