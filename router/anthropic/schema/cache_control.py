"""Cache breakpoints (``cache_control``)."""

from typing import Literal

from pydantic import ConfigDict

from router.openai.schema.cache_control import DEFAULT_TTL, TTL_SECONDS
from router.openai.schema.strict_model import StrictModel


class CacheControl(StrictModel):
    """Marks the end of a prefix of the prompt that is to be kept cached. Unknown fields (such as
    ``scope``) are ignored, since the whole object is only a hint."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None

    @property
    def seconds(self) -> float:
        return TTL_SECONDS[self.ttl or DEFAULT_TTL]
