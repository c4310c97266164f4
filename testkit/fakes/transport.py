"""In-memory transport between regions of one process, with fault injection, for simulations."""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field

from baton.clock import Clock
from baton.core.kv_transfer import Endpoint
from baton.errors import Invalid, Unavailable
from baton.transport.base import Capabilities, Region, TransferRange
from baton.transport.copying import CopyTransport, copy_memory

NAME = "memory"
Fault = Callable[[Endpoint, TransferRange], str]
"""Called before each copy; returns "" to go on, "lost" to fail it, "corrupt" to damage one byte."""


@dataclass(eq=False)
class MemoryFabric:
    """Connects the transports of one simulated cluster. Regions of killed owners are removed."""

    regions: dict[tuple[str, int], Region] = field(default_factory=dict)
    fault: Fault | None = None

    def kill(self, owner: str) -> None:
        for key in [key for key in self.regions if key[0] == owner]:
            del self.regions[key]


class MemoryTransport(CopyTransport):
    """A transport that can read any region of its fabric."""

    def __init__(
        self,
        fabric: MemoryFabric,
        owner: str,
        generation: int,
        clock: Clock,
        host: str = "here",
        name: str = NAME,
    ) -> None:
        super().__init__(owner, generation, host, clock, name)
        self._fabric = fabric

    def capabilities(self) -> Capabilities:
        return Capabilities(local_only=True, devices=frozenset({"cpu"}), copies_in_post=True)

    def register(self, region: Region) -> None:
        super().register(region)
        self._fabric.regions[self.owner, self.generation] = region

    def export(self) -> Endpoint:
        size = self.region.size_bytes
        return Endpoint(self.name, self.owner, self.generation, self.host, size, b"")

    def attach(self, endpoint: Endpoint) -> None:
        region = self._find(endpoint)
        if region.size_bytes != endpoint.region_size_bytes:
            raise Invalid(
                f"the region of {endpoint.owner} has {region.size_bytes} bytes, not "
                f"{endpoint.region_size_bytes} as its endpoint says"
            )

    def detach(self, endpoint: Endpoint) -> None:
        """Do nothing: nothing is attached."""

    def copy(self, endpoint: Endpoint, span: TransferRange) -> None:
        source = self._find(endpoint)
        fault = self._fabric.fault(endpoint, span) if self._fabric.fault else ""
        if fault == "lost":
            raise Unavailable(f"a read from {endpoint.owner} was lost")
        target = self.region.address + span.local_offset
        copy_memory(target, source.address + span.remote_offset, span.size_bytes)
        if fault == "corrupt":
            byte = ctypes.c_ubyte.from_address(target)
            byte.value ^= 0xFF

    def _find(self, endpoint: Endpoint) -> Region:
        region = self._fabric.regions.get((endpoint.owner, endpoint.generation))
        if region is None:
            raise Unavailable(f"the region of {endpoint.owner} is gone")
        return region
