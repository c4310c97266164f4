"""The links between the GPUs of a worker, and the cost of collective operations over them."""

from dataclasses import dataclass
from enum import Enum

LAUNCH_SECONDS = 3.6e-6
"""Time of a collective operation beside its steps and its bytes (see :class:`GpuLink`)."""

LINK_EFFICIENCY = 0.8
"""Assumed share of a link's peak bandwidth that collective operations reach."""


class Topology(Enum):
    """How the GPUs of a group are connected: by a SWITCH, over which each reaches each other one
    with its whole bandwidth; by a MESH, in which each two have a link of their own; or over a BUS,
    on which data goes from neighbour to neighbour in a ring."""

    SWITCH = "switch"
    MESH = "mesh"
    BUS = "bus"


@dataclass(frozen=True, slots=True)
class CollectiveCost:
    """The time of a collective operation: ``fixed_seconds``, and ``per_byte_seconds`` for each byte
    of its message."""

    fixed_seconds: float
    per_byte_seconds: float


NO_COST = CollectiveCost(0.0, 0.0)


@dataclass(frozen=True, slots=True)
class GpuLink:
    """A kind of link. ``bytes_per_second`` is a GPU's bandwidth in each direction; in a MESH, that
    of the link between two GPUs. ``hop_seconds`` is the latency of one step of a collective
    operation.

    A collective operation takes a time to launch, a latency per step, and the bytes that a GPU
    sends, divided by its bandwidth. This is the model of NCCL (``src/graph/tuning.cc``), from which
    the latencies are taken: those of a ring with the protocol LL, ``baseLat`` and ``hwLat``. The
    numbers of bytes are those of Thakur, Rabenseifner and Gropp, "Optimization of Collective
    Communication Operations in MPICH" (2005), and of NCCL's ``doc/PERFORMANCE.md``."""

    name: str
    topology: Topology
    bytes_per_second: float
    hop_seconds: float

    def all_reduce(self, num_gpus: int) -> CollectiveCost:
        """Return the cost of an all-reduce over a group, per byte of the array that each GPU has
        before and after it. It is a reduce-scatter and an all-gather, in each of which a GPU sends
        ``(num_gpus - 1) / num_gpus`` of the array: in one step over a switch or a mesh, in
        ``num_gpus - 1`` steps around a ring."""
        if num_gpus == 1:
            return NO_COST
        sent = 2 * (num_gpus - 1) / num_gpus
        fixed = LAUNCH_SECONDS + 2 * self._steps(num_gpus) * self.hop_seconds
        return CollectiveCost(fixed, sent / self._bandwidth(num_gpus))

    def all_to_all(self, num_gpus: int) -> CollectiveCost:
        """Return the cost of an all-to-all over a group, per byte that a GPU sends to the others.
        Without a switch or a mesh, it takes ``num_gpus - 1`` steps, in each of which a GPU sends to
        one other."""
        if num_gpus == 1:
            return NO_COST
        fixed = LAUNCH_SECONDS + self._steps(num_gpus) * self.hop_seconds
        return CollectiveCost(fixed, 1 / self._bandwidth(num_gpus))

    def _steps(self, num_gpus: int) -> int:
        return num_gpus - 1 if self.topology is Topology.BUS else 1

    def _bandwidth(self, num_gpus: int) -> float:
        num_links = num_gpus - 1 if self.topology is Topology.MESH else 1
        return self.bytes_per_second * num_links * LINK_EFFICIENCY


NVLINK_HOP_SECONDS, PCIE_HOP_SECONDS, NETWORK_HOP_SECONDS = 0.47e-6, 1e-6, 2.7e-6


def nvlink(gbytes_per_second: float) -> GpuLink:
    """Return NVLink over NVSwitch. A datasheet's bandwidth is the sum of both directions."""
    return GpuLink("NVLink", Topology.SWITCH, gbytes_per_second / 2 * 1e9, NVLINK_HOP_SECONDS)


PCIE_4 = GpuLink("PCIe 4", Topology.BUS, 32e9, PCIE_HOP_SECONDS)
PCIE_5 = GpuLink("PCIe 5", Topology.BUS, 64e9, PCIE_HOP_SECONDS)
"""PCIe with 16 lanes."""

NETWORK = GpuLink("network", Topology.BUS, 50e9, NETWORK_HOP_SECONDS)
"""400 Gb/s per GPU between hosts, as in NVIDIA's DGX H100 (eight ConnectX-7 for eight GPUs)."""
