"""One token of a prompt or an answer, with its logprobs."""

import math
from dataclasses import dataclass

from baton.core.request import TokenLogprob

MIN_LOGPROB = -9999.0
"""JSON has no infinity; OpenAI writes this number for what can't be."""


@dataclass(frozen=True, slots=True)
class TokenEntry:
    """``offset`` is where the token's text begins, in characters of the text that is shown."""

    logprob: TokenLogprob
    offset: int

    @property
    def is_first(self) -> bool:
        """Of a prompt: nothing precedes it, so there is no logprob."""
        return math.isnan(self.logprob.logprob)
