"""Request bodies of the routes for files and batches."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import orjson
from pydantic import Field

from router.http.body_parser import parse_body
from router.http.item_list import is_number
from router.openai.schema.chat_hints import Metadata
from router.serving.schema.strict_model import StrictModel


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
        number: dict[str, Any] = {"seconds": int(seconds)} if is_number(seconds) else {}
        return parse_body(cls, orjson.dumps(fields_given | number))


class CreateBatchBody(StrictModel):
    """The body of POST /v1/batches. ``output_expires_after`` applies to the output files."""

    input_file_id: str
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"]
    completion_window: Literal["24h"]
    metadata: Metadata | None = None
    output_expires_after: ExpiresAfter | None = None
