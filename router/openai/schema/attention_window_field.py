"""The request field ``attention_window``."""

from typing import Annotated

from pydantic import Field

from baton.core.attention_window import MAX_WINDOW_TOKENS, AttentionWindow
from router.openai.schema.strict_model import INTEGRAL, StrictModel

DEFAULT_SINK_TOKENS = 4
"""With fewer sink tokens models lose quality, and more help little (Xiao et al., ICLR 2024, table
2)."""


class AttentionWindowField(StrictModel):
    """Which tokens of its context each token attends to: the first ``sink_tokens`` tokens of the
    prompt, and the last ``recent_tokens`` tokens, its own included."""

    sink_tokens: Annotated[int, Field(ge=0, le=MAX_WINDOW_TOKENS), INTEGRAL] = DEFAULT_SINK_TOKENS
    recent_tokens: Annotated[int, Field(ge=1, le=MAX_WINDOW_TOKENS), INTEGRAL]

    @property
    def window(self) -> AttentionWindow:
        return AttentionWindow(self.sink_tokens, self.recent_tokens)
