"""A request of a trace: when, how long, and which blocks its prompt consists of."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """``blocks`` are ids of the prompt's blocks, each standing for itself and all before it, the
    last one perhaps partial. ``session`` names the conversation; empty when nobody knows it."""

    at_seconds: float
    num_prompt_tokens: int
    num_answer_tokens: int
    blocks: tuple[int, ...]
    session: str = ""
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class Trace:
    """Arrivals in the order of time, from 0 s on."""

    name: str
    block_tokens: int
    arrivals: tuple[TraceRequest, ...]
