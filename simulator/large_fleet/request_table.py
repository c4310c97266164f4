"""The requests that a fleet is serving, as columns of numbers."""

import numpy as np

from baton.errors import Overloaded
from simulator.large_fleet.arrays import Bools, Floats, Ints

MAX_REQUESTS = 1 << 21
"""Maximum number of requests that are served at the same time: about 250 MB."""

INITIAL_REQUESTS = 4096

NEVER = np.inf


class RequestTable:
    """A slot per request that has arrived and has not ended. Times are in seconds of virtual time.

    A request waits for its first token while ``first_token_in_seconds`` is finite: the time until
    then, from the current slice's start, if no more prompts overtake it. It is in its decode
    worker's batch while ``remaining_tokens`` is finite. ``emitted_tokens`` were sent to the client
    before the request's last restart. ``first_token_at_seconds`` is -1 before the first token."""

    def __init__(self) -> None:
        self.in_use: Bools = np.zeros(0, dtype=np.bool_)
        self.arrival_seconds: Floats = np.zeros(0)
        self.deadline_seconds: Floats = np.zeros(0)
        self.prompt_tokens: Floats = np.zeros(0)
        self.answer_tokens: Floats = np.zeros(0)
        self.cached_tokens: Floats = np.zeros(0)
        self.reuse_seconds: Floats = np.zeros(0)
        self.emitted_tokens: Floats = np.zeros(0)
        self.num_restarts: Ints = np.zeros(0, dtype=np.int64)
        self.prefill: Ints = np.zeros(0, dtype=np.int64)
        self.decode: Ints = np.zeros(0, dtype=np.int64)
        self.deadline_bin: Ints = np.zeros(0, dtype=np.int64)
        self.first_token_in_seconds: Floats = np.zeros(0)
        self.first_token_at_seconds: Floats = np.zeros(0)
        self.remaining_tokens: Floats = np.zeros(0)
        self._free: list[int] = []
        self._grow(INITIAL_REQUESTS)

    @property
    def num_slots(self) -> int:
        return len(self.in_use)

    def take(self, count: int) -> Ints:
        """Take ``count`` slots for new requests. Raises Overloaded if there would be more than
        :data:`MAX_REQUESTS`."""
        while len(self._free) < count:
            self._grow(2 * self.num_slots)
        first = len(self._free) - count
        slots = np.array(self._free[first:], dtype=np.int64)
        del self._free[first:]
        self.in_use[slots] = True
        self.emitted_tokens[slots] = 0.0
        self.num_restarts[slots] = 0
        self.first_token_at_seconds[slots] = -1.0
        return slots

    def release(self, slots: Ints) -> None:
        self.in_use[slots] = False
        self.stop(slots)
        self._free.extend(slots.tolist())

    def stop(self, slots: Ints) -> None:
        """Take requests off their workers."""
        self.first_token_in_seconds[slots] = NEVER
        self.remaining_tokens[slots] = NEVER

    def is_running(self, slots: Ints) -> Bools:
        """Return whether each request is on its workers; otherwise it waits to be placed again."""
        waits = self.first_token_in_seconds[slots] < NEVER
        running: Bools = waits | (self.remaining_tokens[slots] < NEVER)
        return running

    def waiting(self) -> Ints:
        """Return the slots of requests that wait for their first token from a prefill worker."""
        return np.flatnonzero(self.first_token_in_seconds < NEVER)

    def answering(self) -> Ints:
        return np.flatnonzero(self.remaining_tokens < NEVER)

    def generated_tokens(self, slots: Ints) -> Floats:
        """Return how many tokens of each answer the client has."""
        left = self.remaining_tokens[slots]
        answering = left < NEVER
        made = np.where(answering, self.answer_tokens[slots] - np.where(answering, left, 0.0), 0.0)
        return np.maximum(np.floor(made), self.emitted_tokens[slots])

    def _grow(self, num_slots: int) -> None:
        if num_slots > MAX_REQUESTS:
            raise Overloaded(
                f"more than {MAX_REQUESTS:,} requests are being served at once; the fleet is too "
                "small for requests that must not be rejected"
            )
        first = self.num_slots
        for name, column in list(vars(self).items()):
            if isinstance(column, np.ndarray):
                grown = np.zeros(num_slots, dtype=column.dtype)
                grown[:first] = column
                setattr(self, name, grown)
        self.stop(np.arange(first, num_slots))
        self._free.extend(range(num_slots - 1, first - 1, -1))
