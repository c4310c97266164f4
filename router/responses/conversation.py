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

MAX_TURNS = 256
"""The maximum number of earlier responses that are followed, one store call for each."""

PREVIOUS_ID = "previous_response_id"

Item = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Conversation:
    """The items of the earlier turns, the oldest first. ``size_bytes`` is their size as JSON."""

    items: Sequence[Item] = ()
    size_bytes: int = 0

    def find(self, item_id: str) -> Item | None:
        return next((item for item in self.items if item.get("id") == item_id), None)


class ConversationReader:
    """Reads one tenant's conversations. ``store`` is None if responses are not stored.
    ``max_bytes`` bounds the size of a conversation."""

    def __init__(self, store: ResponseStore | None, tenant: TenantId, max_bytes: int) -> None:
        self._store = store
        self._tenant = tenant
        self._max_bytes = max_bytes

    async def read(self, previous_id: str | None) -> Conversation:
        """Return the conversation up to a response. Raises ApiError (400, 404) or Unavailable."""
        turns: list[list[Item]] = []
        size, next_id = 0, previous_id
        while next_id is not None:
            if len(turns) == MAX_TURNS:
                raise _too_long(f"more than {MAX_TURNS} responses")
            stored = await self._get(next_id, previous_id or next_id)
            turn = [*stored.input_items, *stored.response["output"]]
            size += len(orjson.dumps(turn))
            if size > self._max_bytes:
                raise _too_long(f"more than {self._max_bytes} bytes")
            turns.append(turn)
            next_id = stored.previous_id
        return Conversation([item for turn in reversed(turns) for item in turn], size)

    async def resolve_references(
        self, items: Sequence[Any], conversation: Conversation
    ) -> list[Any]:
        """Return the items, each reference replaced by the item that it names. Raises ApiError
        (400, 404) or Unavailable."""
        return [
            await self._resolve(item, conversation, f"input[{number}]")
            if _is_reference(item)
            else item
            for number, item in enumerate(items)
        ]

    async def _get(self, response_id: str, previous_id: str) -> StoredResponse:
        stored = (
            await self._store.get(self._tenant, response_id) if self._store is not None else None
        )
        if stored is None:
            kept = "" if response_id == previous_id else f" (its earlier response {response_id!r})"
            kept = kept if self._store is not None else ", because no responses are stored here"
            message = f"Previous response with id {previous_id!r} not found{kept}."
            code = "previous_response_not_found"
            raise ApiError(404, message, param=PREVIOUS_ID, code=code)
        if is_unfinished(stored):
            message = f"{PREVIOUS_ID}: the response {response_id!r} is not complete yet"
            raise ApiError(400, message, param=PREVIOUS_ID, code="invalid_value")
        return stored

    async def _resolve(self, reference: Item, conversation: Conversation, path: str) -> Item:
        item_id = reference["id"]
        item = conversation.find(item_id)
        if item is None and self._store is not None:
            stored = await self._store.get(self._tenant, response_id_of(item_id))
            if stored is not None:
                turn = Conversation([*stored.input_items, *stored.response["output"]])
                item = turn.find(item_id)
        if item is None:
            message = f"Item with id {item_id!r} not found."
            raise ApiError(404, message, param=f"{path}.id", code="item_not_found")
        return item


def _is_reference(item: Any) -> bool:
    if not isinstance(item, dict) or not isinstance(item.get("id"), str):
        return False
    kind = item.get("type")
    return kind == "item_reference" or (kind is None and "role" not in item)


def _too_long(bound: str) -> ApiError:
    message = f"{PREVIOUS_ID}: the conversation has {bound}; begin a new one"
    return ApiError(400, message, param=PREVIOUS_ID, code="context_length_exceeded")
