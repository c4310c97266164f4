"""Lists of items, and pages of them, as in OpenAI's API."""

from collections.abc import Mapping, Sequence
from typing import Protocol, TypeVar

from router.errors import ApiError


class ListItem(Protocol):
    @property
    def id(self) -> str: ...

    @property
    def json(self) -> object: ...


Item = TypeVar("Item", bound=ListItem)


def list_page(items: Sequence[ListItem], query: Mapping[str, str], max_limit: int) -> object:
    """Return the JSON list object with the items that the query parameters ``limit`` and ``after``
    select. Raises ApiError (400)."""
    page, more = paginate(items, query, max_limit)
    return {
        "object": "list",
        "data": [item.json for item in page],
        "first_id": page[0].id if page else None,
        "last_id": page[-1].id if page else None,
        "has_more": more,
    }


def paginate(
    items: Sequence[Item], query: Mapping[str, str], max_limit: int
) -> tuple[Sequence[Item], bool]:
    """Return the items that the query parameters ``limit`` and ``after`` select, and whether there
    are more items after them. Raises ApiError (400)."""
    unknown = query.keys() - {"limit", "after"}
    if unknown:
        message = f"unknown parameter {min(unknown)!r}; known parameters: limit, after"
        raise ApiError(400, message, param=min(unknown))
    limit = query.get("limit", str(min(max_limit, 10_000 if max_limit > 100 else 20)))
    if not is_number(limit) or not 1 <= int(limit) <= max_limit:
        raise ApiError(400, f"limit must be between 1 and {max_limit}", param="limit")
    start = 0
    if "after" in query:
        ids = [item.id for item in items]
        if query["after"] not in ids:
            raise ApiError(400, f"after: there is no item {query['after']!r}", param="after")
        start = ids.index(query["after"]) + 1
    end = start + int(limit)
    return items[start:end], end < len(items)


def is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 10
