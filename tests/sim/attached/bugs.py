"""Bugs of attached workers that a test plants one at a time, as those of
:mod:`tests.sim.whole.bugs`."""

import asyncio
import math
from typing import Any

import orjson

from attached_worker import handover, job, vllm_protocol, vllm_server, worker
from attached_worker.handover import HANDOVER_SECONDS, PromptExport, PromptExports
from attached_worker.job import AttachedJob, must_be_held
from attached_worker.server import Seeds, ServerFacts
from attached_worker.vllm_server import VllmServer
from attached_worker.worker import AttachedWorker
from baton.core.request import FinishReason
from baton.errors import DeadlineExceeded
from tests.sim.attached.server import LEASE_SECONDS
from tests.sim.whole.bugs import Changes, lost_token, repeated_token


def shown_unconfirmed() -> Changes:
    """Tokens are shown before the prefill worker has confirmed that the KV was read in time."""
    return [(AttachedJob, "_may_show", property(lambda self: self.is_finished or not self.is_held))]


def shared_salt() -> Changes:
    """KV of another server is cached under the tenant's salt."""
    original = vllm_protocol.encode_request

    def encode(spec: Any, facts: ServerFacts, kv: Any = None) -> bytes:
        body = orjson.loads(original(spec, facts, kv))
        own = orjson.loads(original(spec, facts))
        body.pop("cache_salt", None)
        return orjson.dumps(body | {k: own[k] for k in own if k == "cache_salt"})

    return [(vllm_server, "encode_request", encode)]


def lease_since_response() -> Changes:
    """A lease is counted from when the worker saw the server's response."""
    offer = PromptExport.offer

    def offer_now(self: PromptExport, kv: Any, lent_since: float) -> None:
        offer(self, kv, self._clock.monotonic())

    return [(PromptExport, "offer", offer_now)]


def lease_since_last_sweep() -> Changes:
    """A lease is counted from the last sweep, which may be after the response came."""
    original = AttachedWorker._sweep

    def sweep(self: AttachedWorker) -> None:
        original(self)
        self._swept_at = (self._swept_at[1], self._swept_at[1])

    return [(AttachedWorker, "_sweep", sweep)]


def confirmed_by_reader() -> Changes:
    """The decode worker's clock decides whether KV was read in time."""
    first, confirm = handover._first_token_or_end, handover._confirm

    async def first_token_or_end(job: AttachedJob, stream: Any) -> None:
        stream.offered_at = asyncio.get_running_loop().time()
        await first(job, stream)
        stream.read_at = asyncio.get_running_loop().time()

    async def confirm_here(stream: Any) -> None:
        await confirm(stream)
        if stream.read_at > stream.offered_at + HANDOVER_SECONDS:
            raise DeadlineExceeded("late")

    return [
        (handover, "HANDOVER_SECONDS", math.inf),
        (handover, "_first_token_or_end", first_token_or_end),
        (handover, "_confirm", confirm_here),
    ]


def unchecked_length() -> Changes:
    """Nobody checks of how many tokens the lent KV is."""
    return [(vllm_server, "transfer_parameters", lambda response, _: _parameters_of(response))]


def _parameters_of(response: Any) -> bytes:
    return orjson.dumps(response[vllm_protocol.TRANSFER])


def longer_than_the_lease() -> Changes:
    """A prompt's KV may be read for longer than it is lent."""
    return [(handover, "HANDOVER_SECONDS", LEASE_SECONDS + 5.0)]


def late_answer_goes_on() -> Changes:
    """The answer from KV that was read late is not aborted when another one is begun."""
    abort = vllm_server._Answer.abort

    def abort_with_job(self: Any) -> None:
        if self._receiver._has_ended:
            abort(self)

    return [(vllm_server._Answer, "abort", abort_with_job)]


def late_tokens_kept() -> Changes:
    """The tokens from KV that was read late are not forgotten."""
    return [(AttachedJob, "restart", lambda self: None)]


def health_only() -> Changes:
    """A server is alive as long as its HTTP server responds."""

    async def probe(self: VllmServer, seconds: float) -> None:
        await self._get("/version")

    return [(VllmServer, "probe", probe)]


def aborted_is_finished() -> Changes:
    """An answer that the server has aborted while shutting down counts as finished."""
    reasons = vllm_protocol.FINISH_REASONS | {"abort": FinishReason.LENGTH}
    return [(vllm_server, "FINISH_REASONS", reasons)]


def last_block_named_once() -> Changes:
    """At the end of a block, the last block is not named twice for the token behind the prompt."""
    return [(vllm_protocol, "_parameters", lambda kv, _: orjson.loads(kv.parameters))]


def sampled_token_shown() -> Changes:
    """The prefill server's token is shown for answers that the other server begins anew."""
    return [(worker, "continues", lambda spec, samples_by_position: not must_be_held(spec))]


def nothing_held() -> Changes:
    """Answers with penalties are shown as they come, and continued elsewhere."""
    return [(job, "must_be_held", lambda spec: False)]


def seeds_trusted() -> Changes:
    """Any server is taken for one that samples by seed and position."""

    async def find(self: VllmServer, facts: ServerFacts) -> Seeds:
        return Seeds.NATIVE

    return [(VllmServer, "_find_seeds", find)]


def export_left() -> Changes:
    """An export stays when its job has ended."""
    return [(PromptExports, "close", lambda self, placement, *, is_answered: None)]


def another_accepted() -> Changes:
    """A server that has come back as another is used as before."""
    original = AttachedWorker._regain_server

    async def regain(self: AttachedWorker) -> None:
        self._facts = await self._server.describe()
        await original(self)

    return [(AttachedWorker, "_regain_server", regain)]


def stop_unnoticed() -> Changes:
    """A worker that was stopped does not ask whether its server is still the same."""
    original = AttachedWorker._sweep

    def sweep(self: AttachedWorker) -> None:
        original(self)
        self._was_stopped = False

    return [(AttachedWorker, "_sweep", sweep)]


BUGS = {
    bug.__name__: bug
    for bug in (
        shown_unconfirmed,
        shared_salt,
        lease_since_response,
        lease_since_last_sweep,
        confirmed_by_reader,
        longer_than_the_lease,
        unchecked_length,
        late_answer_goes_on,
        late_tokens_kept,
        last_block_named_once,
        sampled_token_shown,
        nothing_held,
        seeds_trusted,
        aborted_is_finished,
        health_only,
        export_left,
        another_accepted,
        stop_unnoticed,
        lost_token,
        repeated_token,
    )
}
