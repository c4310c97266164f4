"""Tests the load that mock workers report, the order of their prompts, and their cache."""

import asyncio
from dataclasses import replace

import pytest

from baton.core.ids import Epoch, RequestId, TokenId, WorkerId
from baton.core.request import RequestSpec, SamplingParams
from baton.core.states import Role
from baton.core.task import Task
from baton.worker.limits import MAX_UNCLAIMED_PROMPTS
from baton.worker.mock.kv_transfers import MockKvTransfers
from baton.worker.mock.prefix_cache import MockPrefixCache, block_hashes
from tests.unit.baton.worker.mock.mock_workers import (
    SPEED,
    collect,
    in_virtual_time,
    shared_state,
    spec,
    worker,
)


def test_load_reports_queue_and_memory() -> None:
    async def main() -> None:
        place = shared_state()
        one = worker(place, "p0", Role.PREFILL)
        stream = one.open_stream()
        for number, length in enumerate((20, 40, 40)):
            stream.submit(spec(f"r{number}", length), Task.PREFILL, None)
        await asyncio.sleep(0.05)
        load = one.load
        assert (load.running, load.waiting, load.queued_tokens) == (1, 2, 100)
        assert [round(work.work_seconds, 3) for work in load.queue] == [0.4, 0.4, 0.15]
        assert load.prefill_cost == SPEED and load.decode_cost is not None
        writer = worker(place, "d0")
        writer.open_stream().submit(spec(max_tokens=400), Task.PREFILL_AND_DECODE, None)
        await asyncio.sleep(2.3)
        load = writer.load
        assert (load.decode_requests, load.context_tokens) == (1, 25)
        assert load.promised_tokens == 20 + 256
        assert (load.num_blocks, load.free_blocks) == (1024, 1024 - 7)
        inspection = await writer.inspect()
        assert (inspection.running_requests, inspection.violation, inspection.state) == (
            1,
            "",
            "ready",
        )
        writer.close()

    in_virtual_time(main())


def test_load_reports_late_first_tokens() -> None:
    """Three prompts take 0.4 s each, and are due 0.5 s + 0.4 s after their arrival."""

    async def main() -> None:
        one = worker(shared_state(), "p0", Role.PREFILL)
        stream = one.open_stream()
        for number in range(4):
            request = replace(
                spec(f"r{number}", 40),
                token_ids=(TokenId(number),) * 40,
                ttft_slo_seconds=0.5 if number < 3 else 0.0,
            )
            stream.submit(request, Task.PREFILL, None)
        counts = []
        for pause in (0.85, 0.1, 0.3, 0.4):
            await asyncio.sleep(pause)
            counts.append((one.load.num_first_tokens, one.load.num_late_first_tokens))
        assert counts == [(2, 0), (3, 1), (3, 1), (3, 1)]
        one.close()

    in_virtual_time(main())


def test_long_queue_is_reported_in_few_entries() -> None:
    async def main() -> None:
        one = worker(shared_state(cache_tokens=0))
        stream = one.open_stream()
        for number in range(50):
            stream.submit(spec(f"r{number}"), Task.PREFILL_AND_DECODE, None)
        queue = one.load.queue
        assert len(queue) == 32
        assert sum(work.work_seconds for work in queue) == pytest.approx(50 * 0.2)
        stream.close()

    in_virtual_time(main())


def test_prompts_are_ordered_by_deadline() -> None:
    async def main() -> None:
        one = worker(shared_state(cache_tokens=0))
        stream = one.open_stream()
        for name, seconds in (("first", 0.0), ("patient", 9.0), ("eager", 1.0), ("any", 0.0)):
            base = spec(name, max_tokens=1)
            stream.submit(
                RequestSpec(
                    base.request_id, base.epoch, base.token_ids, 20, base.sampling,
                    ttft_slo_seconds=seconds,
                ),
                Task.PREFILL_AND_DECODE,
                None,
            )  # fmt: skip
        outputs = await collect(stream, 4)
        assert [output.request_id for output in outputs] == ["first", "eager", "patient", "any"]

    in_virtual_time(main())


def test_quiet_tenant_is_next_beside_a_flood() -> None:
    """The quiet tenant's second prompt has a later virtual finish time than the flood's first two
    of those that wait."""

    async def main() -> None:
        one = worker(shared_state(cache_tokens=0))
        stream = one.open_stream()
        names = ("f0", "f1", "f2", "f3", "q0", "q1")
        for name in names:
            tenant, length = (b"flood", 20) if name.startswith("f") else (b"quiet", 15)
            request = replace(spec(name, length, max_tokens=1), tenant=tenant)
            stream.submit(request, Task.PREFILL_AND_DECODE, None)
        outputs = await collect(stream, len(names))
        assert [output.request_id for output in outputs] == ["f0", "q0", "f1", "q1", "f2", "f3"]
        stream.close()

    in_virtual_time(main())


def test_cancelled_prompt_hides_no_other_of_its_tenant() -> None:
    async def main() -> None:
        one = worker(shared_state(cache_tokens=0))
        stream = one.open_stream()
        for name, tenant, length in (
            ("f0", b"flood", 20), ("f1", b"flood", 20), ("q0", b"quiet", 40), ("q1", b"quiet", 10)
        ):  # fmt: skip
            request = replace(spec(name, length, max_tokens=1), tenant=tenant)
            stream.submit(request, Task.PREFILL_AND_DECODE, None)
        stream.cancel(RequestId("q0"), Epoch(1))
        outputs = await collect(stream, 3)
        assert [output.request_id for output in outputs] == ["f0", "q1", "f1"]
        stream.close()

    in_virtual_time(main())


def test_prefixes_are_cached_in_blocks() -> None:
    async def main() -> None:
        one = worker(shared_state())
        stream = one.open_stream()
        cached_tokens = []
        for name, length in (("a", 20), ("b", 20), ("c", 30), ("d", 8)):
            stream.submit(spec(name, length, max_tokens=1), Task.PREFILL_AND_DECODE, None)
            cached_tokens.append((await collect(stream))[0].cached_tokens)
        assert cached_tokens == [0, 19, 20, 7]

    in_virtual_time(main())


def test_least_recently_used_prefix_is_evicted_first() -> None:
    prefixes = MockPrefixCache(4)
    one, other = (1, 2, 3), (7, 8)
    prefixes.add(one)
    prefixes.add(other)
    assert (
        prefixes.num_leading_cached(one),
        prefixes.num_leading_cached(other),
        len(prefixes),
    ) == (2, 2, 4)
    prefixes.add(one[:2])
    prefixes.add((9,))
    assert (
        prefixes.num_leading_cached(one),
        prefixes.num_leading_cached(other),
        prefixes.num_leading_cached((9,)),
    ) == (2, 1, 1)
    salted = RequestSpec(RequestId("r"), Epoch(1), tuple(map(TokenId, range(9))), 9,
                         SamplingParams(1), tenant_salt=b"x")  # fmt: skip
    plain = RequestSpec(RequestId("r"), Epoch(1), salted.token_ids, 9, SamplingParams(1))
    assert len(block_hashes(salted, 4)) == 2
    assert not set(block_hashes(salted, 4)) & set(block_hashes(plain, 4))


def test_unclaimed_prefilled_prompts_are_forgotten() -> None:
    transfers, got = MockKvTransfers(), list[bool]()
    for number in range(MAX_UNCLAIMED_PROMPTS + 1):
        transfers.mark_prefilled(WorkerId("p"), RequestId(f"r{number}"), False)
    transfers.wait_for(WorkerId("p"), RequestId("r0"), got.append)
    transfers.wait_for(WorkerId("p"), RequestId("r1"), got.append)
    assert got == [False]
