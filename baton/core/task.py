"""What a worker is asked to do with a request."""

from enum import StrEnum


class Task(StrEnum):
    """PREFILL: compute the prompt, answer the first token, hold the blocks for a reader.
    DECODE: the blocks come from a source; go on from there. WHOLE: both, here."""

    PREFILL = "prefill"
    DECODE = "decode"
    WHOLE = "whole"
