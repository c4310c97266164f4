"""The hand-over of a request between two attached servers: one computes the prompt, and the other
reads its KV and generates the answer.

A server lends the KV of a prompt for a limited time, and does not say so when another server reads
what has taken its place since: the reader then generates wrong tokens, and counts no error. So a
decode worker shows nothing before the prefill worker has confirmed, by its own clock, that the
first token came while the KV was certainly still there; and its server caches the KV under a salt
that no other request has.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import replace
from typing import Any

import structlog

from attached_worker.job import AttachedJob
from attached_worker.server import ModelServer
from baton.clock import Clock
from baton.core.ids import RequestId, TokenId
from baton.core.kv_transfer import KvTransferDone, KvTransferEvent, KvTransferOpen, ServerKv
from baton.core.request import FinishReason
from baton.errors import BatonError, Corrupt, DeadlineExceeded, NotFound, Unavailable
from baton.rpc.worker_client import KvImportStream

HANDOVER_SECONDS = 10.0
"""How long after a prompt was computed the other server must have read its KV. vLLM's lease is 30 s
by default, and 20 s from each heartbeat of the other server on."""

CONFIRM_SECONDS = 5.0

log = structlog.get_logger(__name__)


class Steps:
    """Runs the steps of a job in a task. If they raise, the job fails. ``begin`` is not called if
    the job ends before the task begins."""

    def __init__(self, job: AttachedJob, begin: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._task = asyncio.create_task(self._run(job, begin))

    def abort(self) -> None:
        self._task.cancel()

    async def _run(self, job: AttachedJob, begin: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            await begin()
        except BatonError as error:
            job.fail(error)
        except Exception:
            log.exception("handover_crashed")
            job.fail(BatonError("internal error"))


# -- the worker whose server computes the prompt -------------------------------------------------


class PromptExport:
    """Offers one prompt's KV to one reader. Implements
    :class:`baton.rpc.worker_service.KvExportStream`."""

    def __init__(self, clock: Clock, on_close: Callable[[], None]) -> None:
        self._clock = clock
        self._on_close = on_close
        self._offer: ServerKv | KvTransferDone | None = None
        self._lent_since = 0.0
        self._read_at: float | None = None
        self._error: BatonError | None = None
        self._changed = asyncio.Event()
        self.has_reader = False

    def offer(self, offer: ServerKv | KvTransferDone, lent_since: float) -> None:
        """Offer KV that the server lends from ``lent_since`` (s of the clock) on, or later; or say
        that the answer has ended."""
        self._offer, self._lent_since = offer, lent_since
        self._changed.set()

    def fail(self, error: BatonError) -> None:
        self._error = error
        self._changed.set()

    async def events(self) -> AsyncGenerator[KvTransferEvent]:
        await self._until(lambda: self._offer is not None)
        kv = self._offer
        assert kv is not None
        yield kv
        if isinstance(kv, KvTransferDone):
            return
        await self._until(lambda: self._read_at is not None)
        read_at = self._read_at or 0.0
        if read_at > self._lent_since + HANDOVER_SECONDS:
            raise DeadlineExceeded(
                f"the KV was read {read_at - self._lent_since:.1f} s after it was computed; it "
                f"must be read within {HANDOVER_SECONDS:g} s"
            )
        yield KvTransferDone(kv.token_id or TokenId(0), is_finished=False)
        await self._until(lambda: False)  # the reader leaves, or the job ends

    async def _until(self, condition: Callable[[], bool]) -> None:
        while self._error is None and not condition():
            self._changed.clear()
            await self._changed.wait()
        if self._error is not None:
            raise self._error

    def acknowledge(self, num_blocks: int) -> None:
        if self._read_at is None:
            self._read_at = self._clock.monotonic()
            self._changed.set()

    def close(self) -> None:
        self._on_close()


class PromptExports:
    """The exports of a worker, by the id of the placement."""

    def __init__(self, clock: Clock, arrival_timeout_seconds: float) -> None:
        self._clock = clock
        self._timeout_seconds = arrival_timeout_seconds
        self._exports: dict[RequestId, PromptExport] = {}
        self._added = asyncio.Event()

    def open(self, placement: RequestId, on_close: Callable[[], None]) -> PromptExport:
        export = self._exports[placement] = PromptExport(self._clock, on_close)
        self._added.set()
        return export

    def close(self, placement: RequestId, *, is_answered: bool) -> None:
        """End the export, and tell its reader whether the answer ended with its first token.
        Idempotent."""
        export = self._exports.pop(placement, None)
        if export is not None and is_answered:
            export.offer(KvTransferDone(TokenId(0), is_finished=True), 0.0)
        elif export is not None:
            export.fail(Unavailable("the prefill worker has ended the request"))

    async def attach_reader(self, opening: KvTransferOpen) -> PromptExport:
        """Wait for the export, since the reader's message may arrive before the router's. Raises
        NotFound if it does not arrive, and Unavailable if it has a reader."""
        placement = opening.request_id
        try:
            async with asyncio.timeout(self._timeout_seconds):
                while placement not in self._exports:
                    self._added.clear()
                    await self._added.wait()
        except TimeoutError as error:
            raise NotFound(f"request {placement} is not on this worker") from error
        export = self._exports[placement]
        if export.has_reader:
            raise Unavailable(f"request {placement} already has a reader")
        export.has_reader = True
        return export


async def compute_prompt(
    server: ModelServer, job: AttachedJob, export: PromptExport, alive_since: Callable[[], float]
) -> None:
    """Have the server compute the job's prompt, and offer its KV. ``alive_since`` returns a time
    before which this process had received everything that had been sent to it: if it was frozen,
    the server may have computed the prompt long before it was noticed.

    The client gets the token that the server chooses at once, and the other server goes on behind
    it, if the answer ``continues`` there. Otherwise that server chooses all tokens."""
    spec, shows = job.spec, job.continues
    if spec.wants_prompt_logprobs and not shows:  # only the server that samples reports them
        job.has_prompt = True
        export.offer(ServerKv(b"", len(spec.token_ids), None), alive_since())
        return
    prompt = await server.prefill(spec, samples=shows)
    lent_since = alive_since()
    is_last = prompt.finish_reason is FinishReason.STOP or spec.max_new_tokens == 1
    job.cached_tokens = prompt.cached_tokens
    if shows and (is_last or prompt.can_follow):
        job.receive(prompt.token_ids, prompt.logprobs, prompt.prompt_logprobs, is_last)
        if is_last:
            job.finish(prompt.finish_reason, prompt.cached_tokens)
            return
    else:
        job.note_prompt()
    token = prompt.token_ids[0] if job.num_new_tokens else None
    kv = ServerKv(prompt.parameters, len(spec.token_ids), token, prompt.cached_tokens)
    export.offer(kv, lent_since)


# -- the worker whose server generates the answer ------------------------------------------------


async def answer_prompt(server: ModelServer, job: AttachedJob, stream: KvImportStream) -> None:
    """Have the server read the KV that ``stream`` offers, and generate the answer; if it has read
    the KV late, have it compute the prompt. Raises Corrupt, Unavailable, and what the source
    reports."""
    spec = job.spec
    kv = await stream.next_event()
    if isinstance(kv, KvTransferDone) and kv.is_finished:
        job.cancel()
        return
    if not isinstance(kv, ServerKv):
        raise Corrupt(f"the source sent an unexpected {type(kv).__name__} in a KV transfer")
    if kv.num_tokens != len(spec.token_ids):
        raise Corrupt(
            f"the source offers KV of {kv.num_tokens} tokens, but the request has "
            f"{len(spec.token_ids)}"
        )
    if kv.token_id is not None:
        spec = replace(spec, token_ids=(*spec.token_ids, kv.token_id))
        job.num_earlier = 1
    answer = server.start(spec, job, kv if kv.parameters else None)
    job.running.append(answer)
    await _first_token_or_end(job, stream)
    if not job.has_tokens.is_set():
        await stream.next_event()  # raises what the source reports
        raise Corrupt("the source confirmed a KV transfer that had not ended")
    try:
        await _confirm(stream)
    except DeadlineExceeded as error:
        # The server may have had no room for it in time. Placed again, it might not have then.
        log.warning("kv_read_late", error=str(error))
        answer.abort()
        job.restart()
        job.running.append(server.start(spec, job))
    job.confirm()
    if job.is_held:
        # The router waits for the prefill worker until the answer comes, which it does at its end.
        await asyncio.Event().wait()


async def _confirm(stream: KvImportStream) -> None:
    """Have the source confirm that the KV was read in time. Raises DeadlineExceeded if it was not,
    or the source does not say so in time."""
    await stream.acknowledge(1)
    try:
        async with asyncio.timeout(CONFIRM_SECONDS):
            done = await stream.next_event()
    except TimeoutError as error:
        raise DeadlineExceeded("the prefill worker does not confirm the KV transfer") from error
    if not isinstance(done, KvTransferDone):
        raise Corrupt(f"the source sent an unexpected {type(done).__name__} in a KV transfer")


async def _first_token_or_end(job: AttachedJob, stream: KvImportStream) -> None:
    waits = [asyncio.ensure_future(each) for each in (job.has_tokens.wait(), stream.ended())]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for each in waits:
            each.cancel()
