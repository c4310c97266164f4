"""A response and the input that it answers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from router.responses.encoded_items import EncodedItems


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """``response`` is the JSON object that the client got, with its ``id``, ``status``, ``output``
    and ``previous_response_id``. ``input_items`` are the items of this request alone, in the form
    in which ``GET /v1/responses/ID/input_items`` lists them; the items of earlier turns belong to
    earlier responses. They are encoded only once, though a background response is stored several
    times."""

    response: Mapping[str, Any]
    input_items: EncodedItems

    @property
    def id(self) -> str:
        return str(self.response["id"])

    @property
    def status(self) -> str:
        return str(self.response["status"])
