"""The result of a benchmark case, compared with the roofline."""

from dataclasses import asdict, dataclass

from baton.engine.bench.bench_case import BenchCase
from baton.engine.bench.ceilings import MeasuredCeilings
from baton.engine.bench.roofline_demand import RooflineDemand
from baton.engine.bench.stopwatch import ElapsedTime


@dataclass(frozen=True, slots=True)
class BenchCaseResult:
    """How fast a case ran. ``elapsed`` is the measured time of the whole case, ``demand`` is the
    least work that the case needs, and ``ceilings`` are the machine's peak rates."""

    case: BenchCase
    elapsed: ElapsedTime
    demand: RooflineDemand
    ceilings: MeasuredCeilings

    @property
    def tokens_per_second(self) -> float:
        return self.case.num_tokens / self.elapsed.wall

    @property
    def flops_per_second(self) -> float:
        return self.demand.flops / self.elapsed.wall

    @property
    def bytes_per_second(self) -> float:
        return self.demand.num_bytes / self.elapsed.wall

    @property
    def bound(self) -> str:
        """The resource that limits the case: ``memory`` (bandwidth) or ``products``
        (arithmetic)."""
        by_memory = self.demand.is_bound_by_memory(self.ceilings.wall)
        return "memory" if by_memory else "products"

    @property
    def roofline_share(self) -> float:
        """Achieved share of the roofline, by wall-clock time."""
        return self.demand.seconds_at(self.ceilings.wall) / self.elapsed.wall

    @property
    def cpu_roofline_share(self) -> float:
        """Achieved share of one core's roofline, by CPU time. Meaningless for a GPU."""
        return self.demand.seconds_at(self.ceilings.cpu) / self.elapsed.cpu

    def as_dict(self) -> dict[str, object]:
        return {
            **asdict(self.case),
            "seconds": self.elapsed.wall,
            "cpu_seconds": self.elapsed.cpu,
            "tokens_per_second": self.tokens_per_second,
            "flops": self.demand.flops,
            "bytes": self.demand.num_bytes,
            "flops_per_second": self.flops_per_second,
            "bytes_per_second": self.bytes_per_second,
            "bound": self.bound,
            "share_of_roof": self.roofline_share,
            "ceiling_flops_per_second": self.ceilings.wall.flops_per_second,
            "ceiling_bytes_per_second": self.ceilings.wall.bytes_per_second,
        }
