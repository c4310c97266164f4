"""The input items of a response, as JSON from which single items can be taken."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import orjson


@dataclass(frozen=True, slots=True)
class EncodedItem:
    """One item: the bytes from ``start`` to ``end`` of ``data``."""

    id: str
    data: bytes
    start: int
    end: int

    @property
    def json(self) -> orjson.Fragment:
        return orjson.Fragment(self.data[self.start : self.end])


@dataclass(frozen=True, slots=True)
class EncodedItems:
    """``data`` has the JSON of all items, one after the other. ``index`` is a JSON object with the
    ``ids`` and the ``sizes`` (in bytes) of the items, so that a page of the items can be sent
    without decoding any of them."""

    index: bytes
    data: bytes

    @property
    def size_bytes(self) -> int:
        return len(self.index) + len(self.data)

    def split(self) -> list[EncodedItem]:
        """Return the items, not decoded. Raises ValueError if the index is damaged."""
        index = orjson.loads(self.index)
        if not _is_index(index, len(self.data)):
            raise ValueError("the index does not fit the items")
        ends = list(accumulate(index["sizes"]))
        return [
            EncodedItem(item_id, self.data, start, end)
            for item_id, start, end in zip(index["ids"], [0, *ends], ends, strict=False)
        ]

    def decode(self) -> list[dict[str, Any]]:
        """Return the items. Raises ValueError if they are damaged. Each item is decoded by itself,
        so that other threads can run in between: the decoder holds the interpreter lock."""
        items = [orjson.loads(self.data[item.start : item.end]) for item in self.split()]
        if not all(isinstance(item, dict) for item in items):
            raise ValueError("an item is not an object")
        return items


def encode_items(items: Sequence[Mapping[str, Any]]) -> EncodedItems:
    """Encode the items, each by itself as in :meth:`EncodedItems.decode`. Raises
    orjson.JSONEncodeError."""
    parts = [orjson.dumps(dict(item)) for item in items]
    index = {"ids": [str(item.get("id")) for item in items], "sizes": list(map(len, parts))}
    return EncodedItems(orjson.dumps(index), b"".join(parts))


def _is_index(index: Any, size_bytes: int) -> bool:
    if not isinstance(index, dict):
        return False
    ids, sizes = index.get("ids"), index.get("sizes")
    return (
        isinstance(ids, list)
        and isinstance(sizes, list)
        and len(ids) == len(sizes)
        and all(isinstance(item_id, str) for item_id in ids)
        and all(type(size) is int and size > 0 for size in sizes)
        and sum(sizes) == size_bytes
    )
