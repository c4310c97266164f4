"""Tests that workers which share prefixes through the store generate the same tokens as workers
without a store, whatever is cached and however the store fails."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from baton.core.attention_window import AttentionWindow
from baton.core.ids import RequestId
from baton.core.kv_transfer import Endpoint
from baton.core.request import RequestOutput, RequestSpec
from baton.transport.base import TransferRange
from prefill_worker.reload_policy import ReloadMode
from testkit.fakes.runner import reference_answer
from tests.sim.store_cluster import CALL_SECONDS, CLOCK, Node, store_cluster, tokens
from tests.sim.virtual_time import simulate
from tests.sim.worker_cluster import request, tokens_of


async def generate(node: Node, spec: RequestSpec) -> dict[str, int]:
    """Run a request and check its tokens; return the number of cached tokens by tier."""
    outputs = await node.generate(spec)
    assert tokens_of(outputs) == reference_answer(spec)[0]
    return cached_by_tier(outputs[0])


def cached_by_tier(first: RequestOutput) -> dict[str, int]:
    counts = {tier: int(first.details[f"cached_{tier}"]) for tier in ("device", "dram", "disk")}
    assert sum(counts.values()) == first.cached_tokens
    return {tier: count for tier, count in counts.items() if count}


def test_another_worker_finds_a_prompt_and_its_answer_in_the_store() -> None:
    async def main() -> None:
        async with store_cluster() as cluster:
            await cluster.start_store("s")
            one, two = cluster.add_worker("one"), cluster.add_worker("two")
            first = request("a", tokens(1, 30), 20)
            assert await generate(one, first) == {}
            await cluster.run_for()
            answer = reference_answer(first)[0]
            # The KV of 30 prompt tokens and 19 answer tokens was computed: 12 full blocks.
            second = request("b", [*tokens(1, 30), *answer, *tokens(9, 9)], 5)
            assert await generate(two, second) == {"dram": 48}
            assert await generate(two, second) | {} == {"device": 56}
            await cluster.run_for()
            cluster.check_integrity()

    simulate(main())


def test_only_a_cluster_with_store_nodes_reports_that_nothing_is_stored() -> None:
    async def main() -> None:
        async with store_cluster() as cluster:
            one, events = cluster.add_worker("one"), []
            for prompt, has_node in ((1, False), (100, True)):
                if has_node:
                    await cluster.start_store("s")
                    cluster.kill_store("s")
                with capture_logs() as logs:
                    await generate(one, request(str(prompt), tokens(prompt, 30), 2))
                    await cluster.run_for()
                events.append([log["event"] for log in logs if log["log_level"] != "debug"])
            assert events == [[], ["store_fetch_failed", "store_put_failed"]]

    simulate(main())


def test_a_stored_prefix_longer_than_the_pool_is_continued_with_its_sinks_and_window() -> None:
    """The prompt has 50 blocks, and the second worker has 9."""

    async def main() -> None:
        async with store_cluster() as cluster:
            await cluster.start_store("s", dram_blocks=64)
            one, two = cluster.add_worker("one"), cluster.add_worker("two", num_blocks=9)
            window = AttentionWindow(sink_tokens=4, recent_tokens=10)
            first = replace(request("a", tokens(1, 200), 3), attention_window=window)
            assert await generate(one, first) == {}
            await cluster.run_for()
            outputs = await two.generate(replace(first, request_id=RequestId("b")))
            assert tokens_of(outputs) == reference_answer(first)[0]
            # The token at position 196 reads positions 0 to 3, and from 187 on.
            assert outputs[0].cached_tokens == 196
            assert outputs[0].details["cached_dram"] == str(4 + 12)
            await cluster.run_for()
            cluster.check_integrity()

    simulate(main())


def test_a_draining_worker_stores_the_blocks_that_only_it_has() -> None:
    """The blocks of the first request were computed before the store was started. The store then
    died and lost the blocks of the second request. The worker must put the blocks of both requests
    into the restarted store before it counts as drained."""

    async def main() -> None:
        async with store_cluster() as cluster:
            one = cluster.add_worker("one")
            early, late = request("a", tokens(1, 40), 4), request("b", tokens(60, 40), 4)
            await generate(one, early)
            await cluster.run_for()
            await cluster.start_store("s")
            await generate(one, late)
            await cluster.run_for()
            cluster.kill_store("s")
            store = await cluster.start_store("s")
            assert store.node.stats().num_blocks == 0
            one.worker.start_drain(permanent=False)
            assert not one.worker.is_drained
            await cluster.run_for(11.0)  # the worker avoids a failed store for a while
            assert one.worker.is_drained
            assert store.node.stats().num_blocks == 20
            two = cluster.add_worker("two")
            assert await generate(two, early) == {"dram": 36}
            assert await generate(two, late) == {"dram": 36}
            cluster.check_integrity()

    simulate(main())


def test_a_draining_worker_leaves_even_without_a_store() -> None:
    async def main() -> None:
        async with store_cluster() as cluster:
            one = cluster.add_worker("one")
            await generate(one, request("a", tokens(1, 40), 4))
            one.worker.start_drain()
            await cluster.run_for()
            assert one.worker.is_drained

    simulate(main())


def test_a_worker_whose_drain_was_revoked_stores_its_blocks_when_it_leaves_later() -> None:
    async def main() -> None:
        async with store_cluster() as cluster:
            one = cluster.add_worker("one")
            await cluster.run_for()
            one.worker.start_drain(permanent=False)
            await cluster.run_for()
            one.worker.convert(one.worker.role)
            assert not one.worker.is_drained
            store = await cluster.start_store(
                "s", dram_blocks=1
            )  # too small to keep the blocks that the worker offers
            await generate(one, request("a", tokens(1, 40), 4))
            await cluster.run_for()
            cluster.kill_store("s")
            store = await cluster.start_store("s")
            one.worker.start_drain()
            await cluster.run_for(11.0)
            assert one.worker.is_drained and store.node.stats().num_blocks == 10

    simulate(main())


def test_a_new_worker_starts_warm_and_a_restarted_store_reads_its_disk(tmp_path: Path) -> None:
    async def main() -> None:
        async with store_cluster() as cluster:
            store = await cluster.start_store("s", tmp_path)
            spec = request("a", tokens(1, 60), 4)
            await generate(cluster.add_worker("one"), spec)
            await cluster.run_for()
            assert await generate(cluster.add_worker("two"), spec) == {"dram": 56}
            assert await store.node.demoter.demote_all() == 15
            cluster.kill_store("s")
            await cluster.start_store("s", tmp_path)
            assert await generate(cluster.add_worker("three"), spec) == {"disk": 56}
            await cluster.run_for()
            cluster.check_integrity()

    simulate(main())


@pytest.mark.parametrize("mode", [ReloadMode.FETCH, ReloadMode.SPLIT, ReloadMode.RECOMPUTE])
@pytest.mark.parametrize("stored", [4, 8, 16, 40, 100, 200])
def test_every_reload_mode_gives_the_same_tokens(mode: ReloadMode, stored: int) -> None:
    async def main() -> None:
        async with store_cluster() as cluster:
            await cluster.start_store("s", dram_blocks=64)
            await generate(cluster.add_worker("one"), request("a", tokens(1, stored), 1))
            await cluster.run_for()
            two = cluster.add_worker("two", prefer=mode)
            spec = request("b", [*tokens(1, stored), *tokens(3, 21)], 6)
            cached = await generate(two, spec)
            if mode is ReloadMode.FETCH:
                assert cached == {"dram": stored}
            elif mode is ReloadMode.RECOMPUTE:
                assert cached == {}
            elif stored >= 40:
                # Blocks were computed from the front and fetched from the back, until both met.
                assert 0 < cached["dram"] < stored
            await cluster.run_for()
            cluster.check_integrity()

    simulate(main())


def test_concurrent_requests_with_one_prompt_share_computed_blocks() -> None:
    async def main() -> None:
        async with store_cluster() as cluster:
            node = cluster.add_worker("one")
            specs = [request(f"r{n}", [*tokens(1, 100), n], 8, seed=n) for n in range(4)]
            answers = await asyncio.gather(*(node.generate(spec) for spec in specs))
            cached = [outputs[0].cached_tokens for outputs in answers]
            for spec, outputs in zip(specs, answers, strict=True):
                assert tokens_of(outputs) == reference_answer(spec)[0]
            assert sum(100 - count for count in cached) < 150, cached  # 400 if no block were shared
            cluster.check_integrity()

    simulate(main())


def test_tenants_share_no_blocks() -> None:
    async def main() -> None:
        async with store_cluster() as cluster:
            await cluster.start_store("s")
            one, two = cluster.add_worker("one"), cluster.add_worker("two")
            mine = request("a", tokens(1, 40), 4)
            await generate(one, mine)
            await cluster.run_for()
            other = replace(mine, tenant_salt=b"other")
            assert await generate(two, other) == {}
            assert await generate(two, replace(mine, request_id=other.request_id)) == {"dram": 36}

    simulate(main())


@pytest.mark.parametrize("fault", ["lost", "corrupt"])
def test_blocks_that_do_not_arrive_are_computed(fault: str) -> None:
    async def main() -> None:
        async with store_cluster() as cluster:
            store = await cluster.start_store("s")
            spec = request("a", tokens(1, 40), 4)
            await generate(cluster.add_worker("one"), spec)
            await cluster.run_for()
            cluster.fabric.fault = lambda endpoint, span: fault if endpoint.owner == "s" else ""
            two = cluster.add_worker("two")
            assert await generate(two, spec) == {}
            cluster.fabric.fault = None
            await cluster.run_for(5.0)
            assert store.node.stats().checksum_failures == 0  # the store's copies are intact
            assert await generate(cluster.add_worker("three"), spec) == {"dram": 36}
            cluster.check_integrity()

    simulate(main())


def test_a_block_corrupted_in_dram_is_never_served_and_is_replaced() -> None:
    async def main() -> None:
        async with store_cluster() as cluster:
            store = await cluster.start_store("s")
            spec = request("a", tokens(1, 40), 4)
            await generate(cluster.add_worker("one"), spec)
            await cluster.run_for()
            store.arena.view[4 * 32 + 5] ^= 1  # a bit of the fifth block
            assert await generate(cluster.add_worker("two"), spec) == {"dram": 16}
            await cluster.run_for()
            assert store.node.stats().checksum_failures == 1
            # The second worker has put the damaged block into the store again.
            assert await generate(cluster.add_worker("three"), spec) == {"dram": 36}

    simulate(main())


def test_a_silent_store_costs_one_timeout_and_then_nothing() -> None:
    async def main() -> None:
        async with store_cluster() as cluster:
            store = await cluster.start_store("s")
            node = cluster.add_worker("one")
            store.is_hung = True
            waited = []
            for number in range(4):
                spec = request(f"r{number}", tokens(number, 20), 1)
                began_at = CLOCK.monotonic()
                assert await generate(node, spec) == {}
                waited.append(CLOCK.monotonic() - began_at)
            steps = 0.03 + 1e-6
            assert waited[0] <= CALL_SECONDS + steps
            assert all(seconds <= steps for seconds in waited[1:]), waited
            store.is_hung = False
            await cluster.run_for(60.0)
            await generate(node, request("x", tokens(50, 20), 1))
            await cluster.run_for()
            assert store.node.stats().num_blocks == 5

    simulate(main())


def test_a_store_killed_during_a_read_delays_the_request_only_briefly() -> None:
    async def main() -> None:
        async with store_cluster() as cluster:
            await cluster.start_store("s")
            spec = request("a", tokens(1, 100), 4)
            await generate(cluster.add_worker("one"), spec)
            await cluster.run_for()

            def die(endpoint: Endpoint, span: TransferRange) -> str:
                cluster.fabric.fault = None
                cluster.kill_store("s")
                return "lost"

            cluster.fabric.fault = die
            two = cluster.add_worker("two")
            began_at = CLOCK.monotonic()
            assert await generate(two, spec) == {}
            assert CLOCK.monotonic() - began_at < CALL_SECONDS + 0.2
            await cluster.run_for()
            cluster.check_integrity()

    simulate(main())
