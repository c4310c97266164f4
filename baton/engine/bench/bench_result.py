"""A work that was measured, beside what it takes at least."""

from dataclasses import asdict, dataclass

from baton.engine.bench.bench_case import BenchCase
from baton.engine.bench.ceilings import MeasuredCeilings
from baton.engine.bench.roofline_demand import RooflineDemand
from baton.engine.bench.stopwatch import ElapsedTime


@dataclass(frozen=True, slots=True)
class BenchResult:
    """``spent``: seconds of the whole work."""

    work: BenchCase
    spent: ElapsedTime
    demand: RooflineDemand
    ceilings: MeasuredCeilings

    @property
    def tokens_per_second(self) -> float:
        return self.work.num_tokens / self.spent.wall

    @property
    def flops_per_second(self) -> float:
        return self.demand.flops / self.spent.wall

    @property
    def bytes_per_second(self) -> float:
        return self.demand.num_bytes / self.spent.wall

    @property
    def bound(self) -> str:
        """By what: ``memory``, or ``products``."""
        by_memory = self.demand.is_bound_by_memory(self.ceilings.wall)
        return "memory" if by_memory else "products"

    @property
    def share(self) -> float:
        """Of the roof, by the wall clock."""
        return self.demand.seconds_at(self.ceilings.wall) / self.spent.wall

    @property
    def cpu_share(self) -> float:
        """Of one core's roof, by CPU seconds. It means nothing for a GPU."""
        return self.demand.seconds_at(self.ceilings.cpu) / self.spent.cpu

    def as_dict(self) -> dict[str, object]:
        return {
            **asdict(self.work),
            "seconds": self.spent.wall,
            "cpu_seconds": self.spent.cpu,
            "tokens_per_second": self.tokens_per_second,
            "flops": self.demand.flops,
            "bytes": self.demand.num_bytes,
            "flops_per_second": self.flops_per_second,
            "bytes_per_second": self.bytes_per_second,
            "bound": self.bound,
            "share_of_roof": self.share,
            "ceiling_flops_per_second": self.ceilings.wall.flops_per_second,
            "ceiling_bytes_per_second": self.ceilings.wall.bytes_per_second,
        }
