"""Tests that a request waits as long as the worker that it waits for makes progress, and fails over
if that worker hangs. Runs whole clusters in virtual time."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import pytest

from baton.core.ids import Epoch, Incarnation, RequestId, TokenId, WorkerId
from baton.core.kv_transfer import WorkerRef
from baton.core.request import RequestSpec, SamplingParams
from baton.core.states import Role
from baton.core.task import Task
from router.generation.attempt import TokenTimeouts
from tests.sim.whole import router
from tests.sim.whole.clients import ClientRequest, ClientResponse, run_client
from tests.sim.whole.cluster import BOOT_SECONDS, Cluster
from tests.sim.whole.history import check_history
from tests.sim.whole.loop import SimLoop
from tests.sim.whole.run import simulation_environment
from tests.sim.whole.seeded_random import SeededRandom
from tests.sim.whole.worker import WorkerPlan

TIMEOUT_SECONDS = 0.6
"""Longer than the interval at which workers announce progress, and than each of their steps."""

PROMPT_TOKENS, ANSWER_TOKENS, NUM_REQUESTS = 96, 24, 12


@pytest.fixture(autouse=True)
def short_timeouts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    timeouts = TokenTimeouts(TIMEOUT_SECONDS, TIMEOUT_SECONDS, TIMEOUT_SECONDS)
    config = replace(router.FAILOVER_CONFIG, timeouts=timeouts)
    monkeypatch.setattr(router, "FAILOVER_CONFIG", config)
    with simulation_environment():
        yield


def spec(number: int) -> RequestSpec:
    prompt = tuple(TokenId((17 * number + token) % 251) for token in range(PROMPT_TOKENS))
    sampling = SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0.0)
    return RequestSpec(RequestId(f"r{number}"), Epoch(1), prompt, len(prompt), sampling)


class Scene:
    """A cluster of one prefill and one decode worker, whose requests all arrive at once.
    ``slowness`` and ``num_blocks`` are those of the prefill and of the decode worker."""

    def __init__(self, loop: SimLoop, slowness: tuple[float, float], num_blocks: tuple[int, int]):
        self.cluster = Cluster(loop, SeededRandom(0))
        self.answers = [ClientResponse(ClientRequest(spec(n), 0.0)) for n in range(NUM_REQUESTS)]
        for role, slow, blocks in zip(
            (Role.PREFILL, Role.DECODE), slowness, num_blocks, strict=True
        ):
            self.add_worker(f"{role.value}0", role, slow, blocks)

    def add_worker(self, name: str, role: Role, slowness: float, num_blocks: int) -> None:
        plan = WorkerPlan(name, role, "h0", num_blocks, slowness, None)
        self.cluster._start_worker(plan, f"{name}:1", f"{name}:10001")

    async def start(self) -> "list[asyncio.Task[None]]":
        """Start the router and the requests; return the clients' tasks."""
        cluster = self.cluster
        await cluster.clock.sleep(BOOT_SECONDS)
        cluster.start_router()
        for answer in self.answers:
            cluster.environment.answers[answer.request.spec.request_id] = answer
        return [
            cluster.clients.start_task(run_client(cluster.router, answer, cluster.clients))
            for answer in self.answers
        ]

    def check(self) -> None:
        check_history(self.answers, False, self.cluster.environment.engine_config)
        assert [answer.end for answer in self.answers] == ["complete"] * NUM_REQUESTS

    @property
    def num_placements(self) -> list[int]:
        generations = [answer.generation for answer in self.answers]
        return [len(each.record.placements) for each in generations if each is not None]


def run_queue(slowness: tuple[float, float], num_blocks: tuple[int, int]) -> float:
    """Run all requests. Check that each is placed once, and return when the last one ends."""
    loop = SimLoop()  # type: ignore[abstract]

    async def main() -> None:
        scene = Scene(loop, slowness, num_blocks)
        await asyncio.wait(await scene.start())
        scene.check()
        assert scene.num_placements == [1] * NUM_REQUESTS
        scene.cluster.stop()

    loop.run(main())
    return loop.time()


def test_a_worker_announces_progress_only_if_it_computes() -> None:
    loop = SimLoop()  # type: ignore[abstract]

    async def main() -> None:
        scene = Scene(loop, (1.0, 1.0), (400, 400))
        prefill, decode = scene.cluster.workers.values()
        await scene.cluster.clock.sleep(BOOT_SECONDS)
        source = WorkerRef(WorkerId("prefill0"), prefill.address, Incarnation(1))
        stream = decode.worker.open_stream()
        stream.submit(spec(0), Task.DECODE, source)  # the prefill worker has no such request
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.9):  # the prefill worker waits 1 s for the request
                await stream.next_outputs()
        stream.submit(spec(1), Task.PREFILL_AND_DECODE, None)
        messages = [await stream.next_outputs()]
        while not any(output.finish_reason for output in messages[-1]):
            messages.append(await stream.next_outputs())
        assert messages.count(()) == 1  # the worker checks every 0.25 s whether to announce it
        scene.cluster.stop()

    loop.run(main())


def test_a_queue_of_prompts_restarts_no_request() -> None:
    assert run_queue(slowness=(8.0, 1.0), num_blocks=(400, 400)) > 8 * TIMEOUT_SECONDS


def test_a_wait_for_the_decode_workers_memory_restarts_no_request() -> None:
    """The decode worker has memory for one request, and the prefill worker for all of them. It
    announces progress between two of its steps, 0.25 s after the last time: a step takes 0.2 s."""
    blocks = (PROMPT_TOKENS + ANSWER_TOKENS) // 4 + 4
    assert run_queue(slowness=(1.0, 40.0), num_blocks=(400, blocks)) > 60 * TIMEOUT_SECONDS


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_requests_on_a_worker_whose_engine_hangs_fail_over(role: Role) -> None:
    """The worker's process answers pings, accepts requests, and announces that it is ready."""
    loop = SimLoop()  # type: ignore[abstract]

    async def main() -> None:
        scene = Scene(loop, (4.0, 4.0), (400, 400))
        scene.add_worker(f"{role.value}1", role, 4.0, 400)
        clients = await scene.start()
        await scene.cluster.clock.sleep(1.0)
        scene.cluster.workers[f"{role.value}0"].engine_handle.hang()
        await asyncio.wait(clients)
        scene.check()
        errors = {
            placed.error
            for answer in scene.answers
            if answer.generation is not None
            for placed in answer.generation.record.placements
            if placed.error
        }
        assert errors
        hung = f"worker {role.value}0 has made no progress for {TIMEOUT_SECONDS:g} s"
        assert all(hung in error for error in errors), errors
        scene.cluster.stop()

    loop.run(main())
