"""Who may start to answer, so that memory suffices until all have finished, as far as predicted.

Answers grow by a token a step and give everything back at their end. So what is held together
peaks just before somebody ends: memory suffices for all iff it does at each predicted end
(Jaillet et al. 2025, "Online Scheduling for LLM Inference with KV Cache Constraints",
arXiv 2502.07115). Of those that wait the shortest predicted answer starts first. Pure.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter


@dataclass(frozen=True, slots=True)
class KvDemand:
    """Tokens of KV: ``held`` from the start (now, for who runs), ``to_come`` one a step."""

    held: int
    to_come: int


_to_come = attrgetter("to_come")


class MemoryForecast:
    """Those that run, by how much is to come. Each question costs one pass over them."""

    def __init__(self, running: Iterable[KvDemand], capacity: int) -> None:
        self._running = sorted(running, key=_to_come)
        self._capacity = capacity

    def fits(self, candidate: KvDemand) -> bool:
        """Whether all that run and the candidate find room at each end, to its own."""
        return self._suffices(candidate)

    def add(self, candidate: KvDemand) -> None:
        """It runs from now on."""
        insort(self._running, candidate, key=_to_come)

    def _suffices(self, candidate: KvDemand) -> bool:
        """From the last end to the first: ``held`` and ``count`` are of all that run until then.
        Ends after the candidate's are no concern of its: it holds nothing then."""
        end = bisect_left(self._running, candidate.to_come, key=_to_come)
        later = self._running[end:]
        held = candidate.held + sum(each.held for each in later)
        count = 1 + len(later)
        if held + count * candidate.to_come > self._capacity:
            return False
        for each in reversed(self._running[:end]):
            held += each.held
            count += 1
            if held + count * each.to_come > self._capacity:
                return False
        return True


def select_admissible(
    running: Iterable[KvDemand], candidates: Sequence[KvDemand], capacity: int
) -> list[int]:
    """Indexes of the candidates that may start now, in the order of their start: the shortest
    answer first, and none after the first that doesn't fit, so that it isn't passed for ever."""
    forecast = MemoryForecast(running, capacity)
    admitted: list[int] = []
    for index in sorted(range(len(candidates)), key=lambda i: candidates[i].to_come):
        if not forecast.fits(candidates[index]):
            break
        forecast.add(candidates[index])
        admitted.append(index)
    return admitted


def peak_tokens(running: Iterable[KvDemand]) -> int:
    """The most that is held together at any time from now on."""
    held, peak = 0, 0
    ordered = sorted(running, key=_to_come, reverse=True)
    for count, each in enumerate(ordered, 1):
        held += each.held
        peak = max(peak, held + count * each.to_come)
    return peak
