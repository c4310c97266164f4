"""Tests that routers place requests on mixed workers by the hash ring while no conductor
answers."""

import pytest

from baton.clock import ManualClock
from baton.core.ids import BlockKey, Epoch, Incarnation, RequestId, TenantId, WorkerId
from baton.core.member import Member
from baton.core.placement import Placement, PlacementQuery
from baton.core.states import WorkerState
from baton.core.worker_kinds import WORKER_KINDS
from baton.errors import Unavailable
from router.generation.cluster import Cluster
from router.generation.ring_placer import RingPlacer
from testkit.fakes.registry import MemoryRegistry


async def cluster_of(*names: str) -> Cluster:
    """Return a cluster with a ready worker per name, whose first letter says its role."""
    clock = ManualClock(1.0)
    registry = MemoryRegistry(clock)
    roles = {role.value[0]: role for role in WORKER_KINDS}
    for name in names:
        await registry.announce(
            Member(WorkerId(name), roles[name[0]], f"{name}:1", Incarnation(1), WorkerState.READY),
            1e6,
        )
    cluster = Cluster(registry, clock)
    await cluster.refresh()
    return cluster


async def place(cluster: Cluster, number: int, *excluded: str) -> Placement:
    keys = tuple(BlockKey(bytes([number, block]) * 8) for block in range(8))
    query = PlacementQuery(
        RequestId(f"r{number}"), Epoch(1), TenantId("t"), 128, 32, keys,
        frozenset(map(WorkerId, excluded)), "m",
    )  # fmt: skip
    return await RingPlacer(cluster.workers_of("", 4096)).place(query)


async def test_mixed_workers_serve_whole_requests() -> None:
    cluster = await cluster_of("m0", "m1", "m2")
    assert cluster.workers_of("", 4096).is_ready
    placements = [await place(cluster, number) for number in range(60)]
    assert {placement.decode.id for placement in placements} == {"m0", "m1", "m2"}
    assert {placement.prefill for placement in placements} == {None}
    assert {placement.reason for placement in placements} == {"ring: a mixed worker"}
    again = await place(cluster, 7, placements[7].decode.id)
    assert again.decode.id not in ("", placements[7].decode.id)


async def test_ring_of_a_hybrid_has_prefill_and_mixed_workers() -> None:
    cluster = await cluster_of("p0", "d0", "m0")
    placements = [await place(cluster, number) for number in range(60)]
    found = {(each.prefill and each.prefill.id, each.decode.id) for each in placements}
    assert found == {("p0", "d0"), (None, "m0")}


async def test_request_is_never_split_without_both_pools() -> None:
    for others in (("p0",), ("d0",)):
        cluster = await cluster_of(*others, "m0")
        assert {(await place(cluster, n)).decode.id for n in range(20)} == {"m0"}
        alone = await place(cluster, 0, "m0")
        assert [each.id for each in alone.workers] == list(others)
        with pytest.raises(Unavailable):
            await place(cluster, 0, "m0", *others)
