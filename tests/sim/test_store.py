"""Prefixes between workers by way of the store: the same tokens as alone, whatever is cached, and
however the store behaves."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from baton.core.kv_transfer import Endpoint
from baton.core.request import RequestOutput, RequestSpec
from baton.engine.fake_runner import reference_answer
from baton.transport.base import TransferRange
from baton.worker.reload_policy import ReloadMode
from tests.sim.store_cluster import CALL_SECONDS, CLOCK, Node, store_cluster, tokens
from tests.sim.virtual_time import simulate
from tests.sim.worker_cluster import request, tokens_of


async def ask(node: Node, spec: RequestSpec) -> dict[str, int]:
    """Answers as if alone; where its cached tokens came from."""
    outputs = await node.answer(spec)
    assert tokens_of(outputs) == reference_answer(spec)[0]
    return tiers(outputs[0])


def tiers(first: RequestOutput) -> dict[str, int]:
    told = {tier: int(first.details[f"cached_{tier}"]) for tier in ("device", "dram", "disk")}
    assert sum(told.values()) == first.cached_tokens
    return {tier: count for tier, count in told.items() if count}


def test_a_prompt_and_its_answer_are_found_by_another_worker() -> None:
    async def main() -> None:
        async with store_cluster() as cluster:
            await cluster.start_store("s")
            one, two = cluster.add_worker("one"), cluster.add_worker("two")
            first = request("a", tokens(1, 30), 20)
            assert await ask(one, first) == {}
            await cluster.settle()
            answer = reference_answer(first)[0]
            # 30 tokens and 19 of the answer were computed: 12 full blocks of 4.
            second = request("b", [*tokens(1, 30), *answer, *tokens(9, 9)], 5)
            assert await ask(two, second) == {"dram": 48}
            assert await ask(two, second) | {} == {"device": 56}
            await cluster.settle()
            cluster.check()

    simulate(main())


def test_who_leaves_hands_over_what_only_it_holds() -> None:
    """There was no store when it was computed, and what the store had it lost with its life."""

    async def main() -> None:
        async with store_cluster() as cluster:
            one = cluster.add_worker("one")
            early, late = request("a", tokens(1, 40), 4), request("b", tokens(60, 40), 4)
            await ask(one, early)
            await cluster.settle()
            await cluster.start_store("s")
            await ask(one, late)
            await cluster.settle()
            cluster.kill_store("s")
            store = await cluster.start_store("s")
            assert store.node.stats().num_blocks == 0
            one.worker.start_drain(for_good=False)
            assert not one.worker.drained
            await cluster.settle(11.0)  # a store that failed is left alone for a while
            assert one.worker.drained
            assert store.node.stats().num_blocks == 20
            two = cluster.add_worker("two")
            assert await ask(two, early) == {"dram": 36}
            assert await ask(two, late) == {"dram": 36}
            cluster.check()

    simulate(main())


def test_who_leaves_and_finds_no_store_leaves_all_the_same() -> None:
    async def main() -> None:
        async with store_cluster() as cluster:
            one = cluster.add_worker("one")
            await ask(one, request("a", tokens(1, 40), 4))
            one.worker.start_drain()
            await cluster.settle()
            assert one.worker.drained

    simulate(main())


def test_who_stays_after_all_hands_over_once_more_when_it_leaves() -> None:
    async def main() -> None:
        async with store_cluster() as cluster:
            one = cluster.add_worker("one")
            await cluster.settle()
            one.worker.start_drain(for_good=False)
            await cluster.settle()
            one.worker.convert(one.worker.role)
            assert not one.worker.drained
            store = await cluster.start_store("s", room=1)  # too small to keep what it is offered
            await ask(one, request("a", tokens(1, 40), 4))
            await cluster.settle()
            cluster.kill_store("s")
            store = await cluster.start_store("s")
            one.worker.start_drain()
            await cluster.settle(11.0)
            assert one.worker.drained and store.node.stats().num_blocks == 10

    simulate(main())


def test_a_worker_reborn_starts_warm_and_a_store_from_its_disk(tmp_path: Path) -> None:
    async def main() -> None:
        async with store_cluster() as cluster:
            store = await cluster.start_store("s", tmp_path)
            spec = request("a", tokens(1, 60), 4)
            await ask(cluster.add_worker("one"), spec)
            await cluster.settle()
            assert await ask(cluster.add_worker("two"), spec) == {"dram": 56}
            assert await store.node.demotion.flush() == 15
            cluster.kill_store("s")
            await cluster.start_store("s", tmp_path)
            assert await ask(cluster.add_worker("three"), spec) == {"disk": 56}
            await cluster.settle()
            cluster.check()

    simulate(main())


@pytest.mark.parametrize("way", [ReloadMode.FETCH, ReloadMode.SPLIT, ReloadMode.RECOMPUTE])
@pytest.mark.parametrize("stored", [4, 8, 16, 40, 100, 200])
def test_every_way_gives_the_same_tokens(way: ReloadMode, stored: int) -> None:
    async def main() -> None:
        async with store_cluster() as cluster:
            await cluster.start_store("s", room=64)
            await ask(cluster.add_worker("one"), request("a", tokens(1, stored), 1))
            await cluster.settle()
            two = cluster.add_worker("two", prefer=way)
            spec = request("b", [*tokens(1, stored), *tokens(3, 21)], 6)
            told = await ask(two, spec)
            if way is ReloadMode.FETCH:
                assert told == {"dram": stored}
            elif way is ReloadMode.RECOMPUTE:
                assert told == {}
            elif stored >= 40:
                # Computed from the front, fetched from the back, until they met.
                assert 0 < told["dram"] < stored
            await cluster.settle()
            cluster.check()

    simulate(main())


def test_two_requests_with_one_prompt_share_what_either_computes() -> None:
    async def main() -> None:
        async with store_cluster() as cluster:
            node = cluster.add_worker("one")
            specs = [request(f"r{n}", [*tokens(1, 100), n], 8, seed=n) for n in range(4)]
            answers = await asyncio.gather(*(node.answer(spec) for spec in specs))
            cached = [outputs[0].cached_tokens for outputs in answers]
            for spec, outputs in zip(specs, answers, strict=True):
                assert tokens_of(outputs) == reference_answer(spec)[0]
            assert sum(100 - count for count in cached) < 150, cached  # alone: 400
            cluster.check()

    simulate(main())


def test_tenants_share_nothing() -> None:
    async def main() -> None:
        async with store_cluster() as cluster:
            await cluster.start_store("s")
            one, two = cluster.add_worker("one"), cluster.add_worker("two")
            mine = request("a", tokens(1, 40), 4)
            await ask(one, mine)
            await cluster.settle()
            other = replace(mine, tenant_salt=b"other")
            assert await ask(two, other) == {}
            assert await ask(two, replace(mine, request_id=other.request_id)) == {"dram": 36}

    simulate(main())


@pytest.mark.parametrize("fault", ["lost", "corrupt"])
def test_what_does_not_arrive_is_computed(fault: str) -> None:
    async def main() -> None:
        async with store_cluster() as cluster:
            store = await cluster.start_store("s")
            spec = request("a", tokens(1, 40), 4)
            await ask(cluster.add_worker("one"), spec)
            await cluster.settle()
            cluster.fabric.fault = lambda endpoint, span: fault if endpoint.owner == "s" else ""
            two = cluster.add_worker("two")
            assert await ask(two, spec) == {}
            cluster.fabric.fault = None
            await cluster.settle(5.0)
            assert store.node.stats().checksum_failures == 0  # its own copies are sound
            assert await ask(cluster.add_worker("three"), spec) == {"dram": 36}
            cluster.check()

    simulate(main())


def test_a_bit_flipped_in_dram_is_never_served_and_mended() -> None:
    async def main() -> None:
        async with store_cluster() as cluster:
            store = await cluster.start_store("s")
            spec = request("a", tokens(1, 40), 4)
            await ask(cluster.add_worker("one"), spec)
            await cluster.settle()
            store.arena.view[4 * 32 + 5] ^= 1  # the fifth block
            assert await ask(cluster.add_worker("two"), spec) == {"dram": 16}
            await cluster.settle()
            assert store.node.stats().checksum_failures == 1
            # The second worker has put what was missing.
            assert await ask(cluster.add_worker("three"), spec) == {"dram": 36}

    simulate(main())


def test_a_silent_store_costs_one_call_and_then_nothing() -> None:
    async def main() -> None:
        async with store_cluster() as cluster:
            store = await cluster.start_store("s")
            node = cluster.add_worker("one")
            store.hung = True
            waited = []
            for number in range(4):
                spec = request(f"r{number}", tokens(number, 20), 1)
                began = CLOCK.monotonic()
                assert await ask(node, spec) == {}
                waited.append(CLOCK.monotonic() - began)
            steps = 0.03 + 1e-6
            assert waited[0] <= CALL_SECONDS + steps
            assert all(seconds <= steps for seconds in waited[1:]), waited
            store.hung = False
            await cluster.settle(60.0)
            await ask(node, request("x", tokens(50, 20), 1))
            await cluster.settle()
            assert store.node.stats().num_blocks == 5

    simulate(main())


def test_a_store_killed_while_it_is_read() -> None:
    async def main() -> None:
        async with store_cluster() as cluster:
            await cluster.start_store("s")
            spec = request("a", tokens(1, 100), 4)
            await ask(cluster.add_worker("one"), spec)
            await cluster.settle()

            def die(endpoint: Endpoint, span: TransferRange) -> str:
                cluster.fabric.fault = None
                cluster.kill_store("s")
                return "lost"

            cluster.fabric.fault = die
            two = cluster.add_worker("two")
            began = CLOCK.monotonic()
            assert await ask(two, spec) == {}
            assert CLOCK.monotonic() - began < CALL_SECONDS + 0.2
            await cluster.settle()
            cluster.check()

    simulate(main())
