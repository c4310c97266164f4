"""A trace: the arrival times, lengths and prompt blocks of requests."""

from dataclasses import dataclass

import numpy as np

from baton.errors import Invalid


def seeded_generator(seed: int) -> np.random.Generator:
    """Return a generator that draws the same numbers for the same seed. Raises Invalid for a
    negative seed."""
    if seed < 0:
        raise Invalid(f"the seed is {seed}; it must not be negative", param="seed")
    return np.random.default_rng(seed)


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """A request of a trace. ``block_ids`` are the ids of the prompt's blocks. An id identifies a
    block together with all blocks before it; the last block may be partial. ``session`` is the name
    of the conversation; empty if unknown."""

    arrival_seconds: float
    num_prompt_tokens: int
    num_answer_tokens: int
    block_ids: tuple[int, ...]
    session: str = ""
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class Trace:
    """The requests of a trace in order of arrival, the first at 0 s."""

    name: str
    block_tokens: int
    requests: tuple[TraceRequest, ...]
