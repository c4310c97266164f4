"""A worker's task in the placement of a request."""

from enum import StrEnum


class Task(StrEnum):
    """PREFILL: compute the prompt, generate the first token, and export the blocks. DECODE: read
    the blocks from a source, then decode. PREFILL_AND_DECODE: do both on this worker."""

    PREFILL = "prefill"
    DECODE = "decode"
    PREFILL_AND_DECODE = "whole"
