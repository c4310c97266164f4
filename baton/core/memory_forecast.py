"""Decides which requests may start decoding: those for which KV memory is predicted to suffice
until all of them have finished.

Each request grows by a token per step, and frees all its memory at its end. So the memory in use
peaks just before a request ends, and memory suffices for all requests iff it suffices at each
predicted end (Jaillet et al. 2025, "Online Scheduling for LLM Inference with KV Cache Constraints",
arXiv 2502.07115). Among the waiting requests, the one with the shortest predicted answer starts
first.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter


@dataclass(frozen=True, slots=True)
class KvDemand:
    """A request's KV in tokens: ``current_tokens`` are in use now (for a waiting request, at its
    start), and ``remaining_tokens`` are added later, one per step."""

    current_tokens: int
    remaining_tokens: int


_remaining_tokens = attrgetter("remaining_tokens")


class MemoryForecast:
    """Predicts, from the running requests, whether KV memory suffices for another one. Each query
    takes one pass over the running requests."""

    def __init__(self, running: Iterable[KvDemand], capacity_tokens: int) -> None:
        self._running = sorted(running, key=_remaining_tokens)
        self._capacity = capacity_tokens

    def fits(self, candidate: KvDemand) -> bool:
        """Return whether memory suffices for the running requests and the candidate at each
        predicted end of a request, up to the candidate's own end."""
        return self._suffices(candidate)

    def add(self, candidate: KvDemand) -> None:
        """Count the candidate as running from now on."""
        insort(self._running, candidate, key=_remaining_tokens)

    def _suffices(self, candidate: KvDemand) -> bool:
        """Return whether memory suffices at the predicted end of each request, up to the
        candidate's end. (Later ends don't matter: the candidate has freed its memory by then.)

        The candidate's end is checked first, and then the earlier ends, from the latest to the
        earliest. At each end, the local variable ``count`` is the number of requests that run until
        then or longer, and the local variable ``held`` is the sum of their current tokens."""
        end = bisect_left(self._running, candidate.remaining_tokens, key=_remaining_tokens)
        later = self._running[end:]
        held = candidate.current_tokens + sum(each.current_tokens for each in later)
        count = 1 + len(later)
        if held + count * candidate.remaining_tokens > self._capacity:
            return False
        for each in reversed(self._running[:end]):
            held += each.current_tokens
            count += 1
            if held + count * each.remaining_tokens > self._capacity:
                return False
        return True


def select_admissible(
    running: Iterable[KvDemand], candidates: Sequence[KvDemand], capacity_tokens: int
) -> list[int]:
    """Return the indexes of the candidates that may start now, in the order in which they start:
    shortest answer first. The selection stops at the first candidate that doesn't fit, so that no
    request is overtaken forever."""
    forecast = MemoryForecast(running, capacity_tokens)
    admitted: list[int] = []
    for index in sorted(range(len(candidates)), key=lambda i: candidates[i].remaining_tokens):
        if not forecast.fits(candidates[index]):
            break
        forecast.add(candidates[index])
        admitted.append(index)
    return admitted


def peak_tokens(running: Iterable[KvDemand]) -> int:
    """Return the predicted maximum of the KV tokens in use at any time from now on."""
    held, peak = 0, 0
    ordered = sorted(running, key=_remaining_tokens, reverse=True)
    for count, each in enumerate(ordered, 1):
        held += each.current_tokens
        peak = max(peak, held + count * each.remaining_tokens)
    return peak
