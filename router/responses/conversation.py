"""Finds the earlier turns of a conversation in the store."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import orjson

from baton.core.ids import TenantId
from router.errors import ApiError, invalid_field
from router.responses.input_items import response_id_of
from router.responses.response_status import is_unfinished
from router.responses.response_store import ResponseStore, read_response
from router.responses.stored_response import EncodedResponse, log_damage
from router.serving.memory_budgets import StoredBytesShare
from router.serving.offload_executor import OffloadExecutor

MAX_RESPONSES = 256
"""The maximum number of stored responses that one request may read. Each takes one call to the
store."""

PREVIOUS_ID = "previous_response_id"

Item = Mapping[str, Any]


class ConversationReader:
    """Reads the conversation of one request. ``store`` is None if responses are not stored.
    ``max_bytes`` bounds the size of all that the request takes from the store, as JSON. ``charge``
    is called with the size of each part of it, before the next response is read; it raises
    Overloaded if there is no memory for the part. ``new_memory`` returns the memory for a response
    until it is decoded. Large responses are decoded by ``executor``."""

    def __init__(
        self,
        store: ResponseStore | None,
        tenant: TenantId,
        max_bytes: int,
        charge: Callable[[int], None],
        new_memory: Callable[[], StoredBytesShare],
        executor: OffloadExecutor,
    ) -> None:
        self._store = store
        self._tenant = tenant
        self._max_bytes = max_bytes
        self._charge = charge
        self._new_memory = new_memory
        self._executor = executor
        self._size_bytes = 0
        self._history: Sequence[Item] = ()
        self._num_references: Mapping[str, int] = {}
        """How often the input refers to each item, by their ids."""
        self._referenced: dict[str, Item] = {}
        """Those of these items that were found, by their ids."""
        self._read_ids: set[str] = set()

    async def read(self, previous_id: str | None) -> Sequence[Item]:
        """Return the items of the conversation up to a response, the oldest first. Call before
        :meth:`resolve_references`. Raises ApiError (400), Overloaded or Unavailable."""
        if previous_id is not None and self._store is None:
            raise _nothing_stored()
        turns: list[Sequence[Item]] = []
        next_id = previous_id
        while next_id is not None:
            turn = await self._read_turn(next_id, PREVIOUS_ID, is_finished=True)
            if turn is None:
                raise _previous_not_found(previous_id or next_id, next_id)
            turns.append(turn.items)
            self._count(turn.size_bytes, PREVIOUS_ID)
            next_id = turn.previous_id
        self._history = [item for turn in reversed(turns) for item in turn]
        return self._history

    async def resolve_references(self, items: Sequence[Any]) -> list[Any]:
        """Return the items, each reference replaced by the item that it names. Call once. Raises
        ApiError (400, 404), Overloaded or Unavailable."""
        self._num_references = Counter(item["id"] for item in items if _is_reference(item))
        self._keep_referenced(self._history, "input")
        return [
            await self._resolve(item["id"], f"input[{number}].id") if _is_reference(item) else item
            for number, item in enumerate(items)
        ]

    async def _resolve(self, item_id: str, path: str) -> Item:
        response_id = response_id_of(item_id)
        if item_id not in self._referenced and response_id not in self._read_ids:
            turn = await self._read_turn(response_id, path)
            if turn is not None:
                self._keep_referenced(turn.items, path)
        item = self._referenced.get(item_id)
        if item is None:
            message = f"Item with id {item_id!r} not found."
            raise ApiError(404, message, param=path, code="item_not_found")
        return item

    async def _read_turn(
        self, response_id: str, path: str, *, is_finished: bool = False
    ) -> "_Turn | None":
        """Read and decode a response. Returns None if there is none with this id, or if it is
        damaged. Raises ApiError (400) if it must be finished and is not."""
        if self._store is None:
            return None
        if len(self._read_ids) == MAX_RESPONSES:
            raise _too_long(f"the conversation has more than {MAX_RESPONSES} responses", path)
        self._read_ids.add(response_id)
        with self._new_memory() as memory:
            stored = await read_response(self._store, self._tenant, response_id, memory)
            if stored is None:
                return None
            if is_finished and is_unfinished(stored):
                message = f"{path}: the response {response_id!r} is not complete yet"
                raise invalid_field(path, message)
            decode = partial(_turn, stored)
            return await self._executor.run(self._tenant, stored.size_bytes, decode)

    def _keep_referenced(self, items: Sequence[Item], path: str) -> None:
        """Keep those of the items to which the input refers, and count the bytes of each once per
        reference. If several items have the same id, the last one is meant."""
        found = {item["id"]: item for item in items if item["id"] in self._num_references}
        for item_id in found.keys() - self._referenced.keys():
            item = self._referenced[item_id] = found[item_id]
            self._count(self._num_references[item_id] * len(orjson.dumps(item)), path)

    def _count(self, num_bytes: int, path: str) -> None:
        """Count bytes that the request takes from the store. Raises ApiError (400) if the total
        exceeds ``max_bytes``, or Overloaded if there is no memory for them."""
        self._size_bytes += num_bytes
        if self._size_bytes > self._max_bytes:
            raise _too_long(f"the conversation has more than {self._max_bytes} bytes", path)
        self._charge(num_bytes)


@dataclass(frozen=True, slots=True)
class _Turn:
    """The decoded items of a response and of its input, their size as JSON, and the id of the
    response that it continues."""

    items: Sequence[Item]
    size_bytes: int
    previous_id: str | None


def _turn(stored: EncodedResponse) -> _Turn | None:
    """Decode a response. If it is damaged, log a warning and return None."""
    try:
        response, items = stored.decode_response(), stored.input_items.decode()
    except ValueError:
        log_damage(stored.id, stored.size_bytes)
        return None
    items += response["output"]
    return _Turn(items, len(orjson.dumps(items)), response.get("previous_response_id"))


def _is_reference(item: Any) -> bool:
    if not isinstance(item, dict) or not isinstance(item.get("id"), str):
        return False
    kind = item.get("type")
    return kind == "item_reference" or (kind is None and "role" not in item)


def _nothing_stored() -> ApiError:
    message = f"{PREVIOUS_ID}: is not supported, because no responses are stored here"
    return invalid_field(PREVIOUS_ID, message, "previous_response_not_found")


def _previous_not_found(previous_id: str, missing_id: str) -> ApiError:
    message = f"Previous response with id {previous_id!r} not found."
    if missing_id != previous_id:
        message = (
            f"The response with id {missing_id!r}, which {previous_id!r} continues, was not found."
        )
    return invalid_field(PREVIOUS_ID, message, "previous_response_not_found")


def _too_long(problem: str, path: str) -> ApiError:
    message = f"{path}: {problem}; begin a new one"
    return invalid_field(path, message, "context_length_exceeded")
