"""The field ``thinking``: whether the model reasons before it answers."""

from typing import Annotated, Literal

from pydantic import Field

from router.openai.schema.strict_model import StrictModel


class ThinkingConfig(StrictModel):
    """Whether the model reasons before it answers. ``budget_tokens`` is a hint without effect:
    ``max_tokens`` limits the reasoning and the answer together."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Annotated[int, Field(ge=1)] | None = None
    display: Literal["summarized", "omitted"] | None = None
