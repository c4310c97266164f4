"""Request bodies and queries of the routes for files and batches."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Protocol, TypeVar

import orjson
from pydantic import Field

from router.errors import ApiError
from router.http.body_parser import parse_body
from router.openai.schema.chat_hints import Metadata
from router.openai.schema.strict_model import StrictModel


class ExpiresAfter(StrictModel):
    """How long a file is kept: between an hour and 30 days, the same limits as OpenAI's."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=3600, le=30 * 24 * 3600)]

    @classmethod
    def of_form(cls, fields: Mapping[str, str]) -> "ExpiresAfter | None":
        """Parse the form fields ``expires_after[anchor]`` and ``expires_after[seconds]``. Raises
        ApiError (400)."""
        fields_given = {
            key: fields[f"expires_after[{key}]"]
            for key in ("anchor", "seconds")
            if f"expires_after[{key}]" in fields
        }
        if "expires_after" in fields:
            return parse_body(cls, fields["expires_after"].encode())
        if not fields_given:
            return None
        seconds = fields_given.get("seconds", "")
        number: dict[str, Any] = {"seconds": int(seconds)} if _is_number(seconds) else {}
        return parse_body(cls, orjson.dumps(fields_given | number))


class CreateBatchBody(StrictModel):
    """The body of POST /v1/batches. ``output_expires_after`` applies to the output files."""

    input_file_id: str
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/responses"]
    completion_window: Literal["24h"]
    metadata: Metadata | None = None
    output_expires_after: ExpiresAfter | None = None


class HasId(Protocol):
    @property
    def id(self) -> str: ...


Item = TypeVar("Item", bound=HasId)


def paginate(
    items: Sequence[Item], query: Mapping[str, str], max_limit: int
) -> tuple[Sequence[Item], bool]:
    """Return the items that ``limit`` and ``after`` select, and whether there are more. Raises
    ApiError (400)."""
    unknown = query.keys() - {"limit", "after"}
    if unknown:
        message = f"unknown parameter {min(unknown)!r}; known parameters: limit, after"
        raise ApiError(400, message, param=min(unknown))
    limit = query.get("limit", str(min(max_limit, 10_000 if max_limit > 100 else 20)))
    if not _is_number(limit) or not 1 <= int(limit) <= max_limit:
        raise ApiError(400, f"limit must be between 1 and {max_limit}", param="limit")
    start = 0
    if "after" in query:
        ids = [item.id for item in items]
        if query["after"] not in ids:
            raise ApiError(400, f"after: there is no item {query['after']!r}", param="after")
        start = ids.index(query["after"]) + 1
    end = start + int(limit)
    return items[start:end], end < len(items)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 10
