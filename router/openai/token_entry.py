"""One token of a prompt or an answer, with its logprobs."""

import math
from dataclasses import dataclass

from baton.core.request import TokenLogprob

MIN_LOGPROB = -9999.0
"""The value that stands for minus infinity, as in OpenAI's API: JSON has no infinity."""


@dataclass(frozen=True, slots=True)
class TokenEntry:
    """A token and its logprobs. ``offset`` is the position of its text, in characters of the text
    that the client gets."""

    logprob: TokenLogprob
    offset: int

    @property
    def is_first(self) -> bool:
        """Whether this is the first token of a prompt. It has no logprob, since nothing precedes
        it."""
        return math.isnan(self.logprob.logprob)
