"""When blocks were read and decoded."""

from collections.abc import Iterable
from dataclasses import dataclass

from baton.transport.reads import busy_seconds


@dataclass(frozen=True, slots=True)
class ReadTimes:
    """When the read of a group of blocks began, when its last bytes had arrived, and when its
    blocks were verified and decoded; all in monotonic seconds."""

    began: float
    arrived: float
    decoded: float


def link_seconds(reads: Iterable[ReadTimes]) -> float:
    """Return the time in which bytes of at least one of the reads were under way."""
    return busy_seconds((each.began, each.arrived) for each in reads)


def read_seconds(reads: Iterable[ReadTimes]) -> float:
    """Return the time in which blocks were read, verified or decoded."""
    return busy_seconds((each.began, each.decoded) for each in reads)
