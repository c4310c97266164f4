"""Failures of racks and zones: workers that share a fate."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from baton.errors import Invalid
from simulator.large_fleet.arrays import Bools, Ints


@dataclass(frozen=True, slots=True)
class Topology:
    """Where workers stand. Each pool's workers are spread evenly over ``num_racks`` racks, in the
    order of their numbers, and the racks over ``num_zones`` zones."""

    num_racks: int
    num_zones: int

    def __post_init__(self) -> None:
        if not 1 <= self.num_zones <= self.num_racks:
            raise Invalid(
                f"there are {self.num_racks} racks and {self.num_zones} zones; there must be at "
                "least one zone, and at least one rack in each"
            )

    def racks(self, num_workers: int) -> Ints:
        """Return the rack of each worker of a pool, ``[num_workers]``."""
        return np.arange(num_workers) * self.num_racks // max(num_workers, 1)

    def zones(self, num_workers: int) -> Ints:
        return self.racks(num_workers) * self.num_zones // self.num_racks


@dataclass(frozen=True, slots=True)
class DomainFailure:
    """At ``at_seconds``, all workers of a rack or zone (``domain``) lose their state and their
    hosts' stores. They are back after ``down_seconds``, with empty caches."""

    domain: str
    number: int
    at_seconds: float
    down_seconds: float

    def affects(self, topology: Topology, num_workers: int) -> Bools:
        """Return which workers of a pool fail, ``[num_workers]``."""
        in_racks = self.domain == "rack"
        places = topology.racks(num_workers) if in_racks else topology.zones(num_workers)
        affected: Bools = places == self.number
        return affected

    def __str__(self) -> str:
        return f"{self.domain}:{self.number}@{self.at_seconds:g}:{self.down_seconds:g}"


_NUMBER = r"(\d+(?:\.\d+)?)"
_FAILURE = re.compile(rf"(rack|zone):(\d+)@{_NUMBER}:{_NUMBER}")


def parse_failures(texts: Sequence[str], topology: Topology) -> tuple[DomainFailure, ...]:
    """Parse failures like ``rack:3@36000:600`` (rack 3 fails at 36,000 s and is back after 600 s).
    Raises Invalid for malformed texts, and for racks and zones that don't exist."""
    return tuple(_parse_failure(text, topology) for text in texts)


def _parse_failure(text: str, topology: Topology) -> DomainFailure:
    match = _FAILURE.fullmatch(text)
    if match is None:
        raise Invalid(
            f"--fail is {text!r}; it must be rack:NUMBER@SECOND:SECONDS or "
            "zone:NUMBER@SECOND:SECONDS, like rack:3@36000:600"
        )
    domain, number = match[1], int(match[2])
    size = topology.num_racks if domain == "rack" else topology.num_zones
    if number >= size:
        raise Invalid(f"there is no {domain} {number}; the {domain}s are 0 to {size - 1}")
    return DomainFailure(domain, number, float(match[3]), float(match[4]))
