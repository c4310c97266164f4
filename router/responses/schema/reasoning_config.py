"""The field ``reasoning``: how long the model reasons, and where its reasoning is returned."""

from typing import Annotated, Literal

from router.openai.schema.strict_model import StrictModel, only_values

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
SummaryDetail = Literal["none", "auto", "concise", "detailed"]
"""OpenAI's values, and ``none``, which some clients send in place of null."""


class ReasoningConfig(StrictModel):
    effort: Effort | None = None
    summary: SummaryDetail | None = None
    generate_summary: SummaryDetail | None = None
    """OpenAI's older name for ``summary``."""
    context: (
        Annotated[str, only_values("auto", "all_turns", why="the chat template decides")] | None
    ) = None
    mode: Annotated[str, only_values("standard", why="there is one mode")] | None = None

    @property
    def wants_summary(self) -> bool:
        return (self.summary or self.generate_summary or "none") != "none"
