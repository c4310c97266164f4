"""Runs attached workers with the clients and faults of one seed, and then checks Baton's
guarantees."""

import asyncio
from dataclasses import replace

from attached_worker.server import Seeds
from baton.core.ids import TokenId
from baton.core.request import FinishReason
from testkit.fakes.runner import reference_answer
from tests.sim.attached.cluster import AttachedCluster
from tests.sim.attached.faults import LAST_SECONDS, AttachedFaultInjector, draw_faults
from tests.sim.attached.server import server_seed
from tests.sim.whole.clients import ClientRequest, ClientResponse, draw_request
from tests.sim.whole.history import check_answer, check_without_faults
from tests.sim.whole.loop import SimLoop
from tests.sim.whole.run import CALM_SECONDS, Run
from tests.sim.whole.seeded_random import SeededRandom

LONGEST_ANSWER_SECONDS = 150.0
"""How long all requests of a run may take: longer than all faults but those that never end."""


class AttachedRun(Run):
    rest_seconds = 60.0

    def __init__(self, seed: int, loop: SimLoop) -> None:
        self._chance = chance = SeededRandom(seed)
        self._asks = [_draw_request(chance, number) for number in range(chance.between(4, 9))]
        self._faults = draw_faults(chance)
        self._cluster = AttachedCluster(loop, chance)
        self.fault_injector = AttachedFaultInjector(self._cluster, self._faults)
        self.answers: list[ClientResponse] = []

    async def _run_with_faults(self) -> None:
        cluster = self._cluster
        await cluster.start()
        async with asyncio.timeout(LONGEST_ANSWER_SECONDS), asyncio.TaskGroup() as tasks:
            tasks.create_task(self.fault_injector.run())
            for ask in self._asks:
                tasks.create_task(self._client(ask))
        cluster.end_faults()
        await self._wait_until_at_rest()
        await self._client(self._probe())
        await self._wait_until_at_rest()
        for answer in self.answers:
            if not self._is_excused(answer):
                check_answer(answer, False, expected_answer(answer, cluster.seeds))
        if not self._faults:
            await cluster.clock.sleep(CALM_SECONDS)
            check_without_faults(self.answers, cluster.router.worker_connections.recently_broken())

    def _is_excused(self, answer: ClientResponse) -> bool:
        """Whether a new request was refused because all workers were out at that moment."""
        is_refused = not answer.tokens and answer.error.startswith("no worker is ready")
        return is_refused and bool(self._faults) and answer is not self.answers[-1]

    def _probe(self) -> ClientRequest:
        return replace(_draw_request(self._chance, len(self._asks)), cancels_after_seconds=None)


def _draw_request(chance: SeededRandom, number: int) -> ClientRequest:
    ask = draw_request(chance, number, with_windows=False)
    spec = replace(ask.spec, adapter=None)
    return replace(ask, spec=spec, at_seconds=LAST_SECONDS * ask.at_seconds)


def expected_answer(
    answer: ClientResponse, seeds: Seeds
) -> tuple[tuple[TokenId, ...], FinishReason]:
    """Return the reference answer. If seeds are ignored, each placement of a sampled one begins a
    generator anew."""
    spec, known = answer.request.spec, tuple[TokenId, ...]()
    reason = FinishReason.ERROR
    placements = answer.generation.record.placements if answer.generation is not None else ()
    for start in [placed.num_tokens_before for placed in placements] or [0]:
        if start >= spec.sampling.max_tokens:
            break
        before = spec.token_ids + known[:start]
        seed = server_seed(seeds, spec.sampling.seed, len(before))
        sampling = replace(spec.sampling, seed=seed)
        rest, reason = reference_answer(replace(spec, token_ids=before, sampling=sampling))
        known = known[:start] + rest
    return known, reason
