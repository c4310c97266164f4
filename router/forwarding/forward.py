"""The way of a request that is forwarded, from its parsed body to the last byte."""

from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import aclosing
from functools import partial
from typing import Any, TypeVar

import structlog

from baton.concurrency.time_limit import TimeLimit
from baton.core.ids import Epoch, RequestId, WorkerId
from baton.core.member import Member
from baton.core.placement import Placement, PlacementQuery
from baton.core.server_api import CHATS, SERVER_ROUTES, ForwardedHead, ForwardRequest
from baton.errors import (
    BatonError,
    DeadlineExceeded,
    Invalid,
    NotFound,
    Overloaded,
    Unavailable,
)
from router.errors import ApiError
from router.forwarding.body import (
    ForwardedBody,
    has_media,
    may_have_media,
    parse_form,
    parse_json,
    read_json,
)
from router.forwarding.usage import UsageReader
from router.generation.generation import final_error
from router.generation.record import GenerationRecord
from router.http.json_limits import max_json_values
from router.http.response_writer import STREAM_HEADERS
from router.limits import MAX_WAIT_BACKOFF_SECONDS, MAX_WORKER_DEATHS
from router.serving.choices import make_session_id, recorded_answer
from router.serving.request_handler import Endpoint, IncomingRequest
from router.serving.served_model import ServedModel
from router.tenants.admission import num_reserved_tokens
from router.tenants.tenant import TenantAttributes

Result = TypeVar("Result")

log = structlog.get_logger(__name__)


async def forward(incoming: IncomingRequest, *, path: str) -> None:
    """Have a server that offers ``path`` answer a request. Raises ApiError or BatonError."""
    arrived_at = incoming.context.clock.monotonic()
    incoming.begin(f"fwd-{incoming.context.ids.new_id()}")
    max_values = max_json_values(incoming.context.models.max_model_tokens)

    def parse() -> ForwardedBody:
        data = incoming.raw.take()
        if SERVER_ROUTES[path].is_form:
            return parse_form(data, incoming.content_type)
        return parse_json(read_json(data, max_values), path)

    await _forward(incoming, path, await _offload(incoming, parse), arrived_at)


SERVER_ENDPOINTS: Mapping[str, Endpoint] = {
    path: Endpoint(route.name, partial(forward, path=path), is_form=route.is_form)
    for path, route in SERVER_ROUTES.items()
}
"""The endpoints by path that only attached servers answer."""


async def forward_chat(incoming: IncomingRequest) -> bool:
    """Have a server answer a chat with images, audio or video. Return False, and leave the request
    as it is, if it is another chat, or if no server of its model takes chats."""
    arrived_at = incoming.context.clock.monotonic()
    max_values = max_json_values(incoming.context.models.max_model_tokens)
    if not any(CHATS in model.workers.server_paths for model in incoming.context.models.all):
        return False

    def parse() -> dict[str, Any] | None:
        if not may_have_media(incoming.raw.data):
            return None
        body = read_json(bytes(incoming.raw.data), max_values)
        return body if has_media(body) else None

    body = await _offload(incoming, parse)
    if body is None:
        return False
    if CHATS not in _offered_paths(_find_model(incoming, body.get("model"))):
        return False
    incoming.raw.take()
    incoming.begin(f"chatcmpl-{incoming.context.ids.new_id()}")
    parsed = await _offload(incoming, lambda: parse_json(body, CHATS))
    await _forward(incoming, CHATS, parsed, arrived_at)
    return True


async def _offload(incoming: IncomingRequest, work: Callable[[], Result]) -> Result:
    executor = incoming.context.resources.offload_executor
    return await executor.run(incoming.tenant, incoming.raw.size_bytes, work)


def _find_model(incoming: IncomingRequest, name: Any) -> ServedModel:
    context = incoming.context
    directory = context.tenants.authenticator.directory
    named = name if isinstance(name, str) else None
    incoming.found_model = context.models.find(named, directory.tenant(incoming.tenant))
    return incoming.found_model


def _with_adapter(model: ServedModel, workers: Iterable[Member]) -> list[Member]:
    """Return those of a model's workers that have its adapter, if it is one."""
    adapter = model.adapter
    return [each for each in workers if adapter is None or each.has_adapter(adapter.digest)]


def _offered_paths(model: ServedModel) -> frozenset[str]:
    """Return what the model's ready servers offer; while there are none, those that may soon be."""
    known = _with_adapter(model, model.workers.known_workers())
    return frozenset(path for each in known for path in each.server_api.paths)


def check_offered(model: ServedModel, path: str) -> None:
    """Raise ApiError (400) if no server of the model offers ``path``, and Unavailable if none is
    known."""
    paths = _offered_paths(model)
    if path in paths:
        return
    if not _with_adapter(model, model.workers.known_workers()):
        raise Unavailable(f"no worker is ready for model {model.name!r}")
    offered = sorted(paths & {*SERVER_ROUTES})
    others = f"; it has {', '.join(offered)}" if offered else ""
    message = (
        f"{path} is not supported by the model {model.shown_name!r}: no server that offers it is "
        f"attached for this model{others}"
    )
    raise ApiError(400, message, param="model", code="unsupported_endpoint")


async def _forward(
    incoming: IncomingRequest, path: str, body: ForwardedBody, arrived_at: float
) -> None:
    context = incoming.context
    model = _find_model(incoming, body.model)
    check_offered(model, path)
    await _reserve_tokens(incoming, body)
    record = GenerationRecord(
        RequestId(incoming.id),
        arrived_at,
        body.num_tokens,
        incoming.tenant,
        has_slo=False,
        model=model.name,
    )
    context.telemetry.history.add_records(incoming.id, [record])
    incoming.admission.set_records([record], 1)
    if incoming.trace is not None:
        incoming.trace.set_records([record], context.clock.monotonic())
    try:
        with recorded_answer(context, record):
            await _relay(incoming, ForwardedAnswer(incoming, path, body, record), body, record)
    finally:
        context.telemetry.metrics.record_request([record], 1)


async def _reserve_tokens(incoming: IncomingRequest, body: ForwardedBody) -> None:
    """Reserve the request's tokens within the tenant's limits. Raises RateLimited or Overloaded."""
    admission, models, model = incoming.admission, incoming.context.models, incoming.model
    admission.set_size(incoming.raw.size_bytes)
    size = [body.num_tokens], body.num_choices, body.answer_tokens
    await admission.draw_token_quota(num_reserved_tokens(*size))
    admission.reserve_tokens(*size)
    admission.take_model_slots(
        lambda count: models.acquire(model, count), lambda count: models.release(model, count)
    )
    incoming.headers |= admission.headers()


async def _relay(
    incoming: IncomingRequest,
    answer: "ForwardedAnswer",
    body: ForwardedBody,
    record: GenerationRecord,
) -> None:
    """Pass the server's answer on to the client, as fast as the client reads."""
    writer, clock = incoming.writer, incoming.context.clock
    usage, num_bytes = UsageReader(ForwardedHead(200, {}), drops_usage=False), 0
    is_batch, max_bytes = writer.inline_body is None, incoming.context.config.max_body_bytes
    async with aclosing(answer.parts()) as parts:
        async for part in parts:
            if isinstance(part, ForwardedHead):
                usage = UsageReader(part, drops_usage=body.drops_usage)
                if is_batch and not usage.is_json:
                    raise Invalid("in a batch, the answer must be JSON: ask for another format")
                headers = {**part.headers, **incoming.headers, **record.headers()}
                if usage.is_stream:
                    headers = STREAM_HEADERS | headers
                await writer.start(part.status, headers, is_document=not usage.is_stream)
                continue
            if usage.is_stream and record.ttft_seconds is None:
                record.ttft_seconds = clock.monotonic() - record.arrived_at
            data = usage.feed(part)
            record.num_tokens = usage.num_events
            if usage.is_known and writer.status < 400:
                usage.report(record)  # now, since a client may leave once it has the answer
            if is_batch:  # the answer is held whole
                num_bytes += len(part)
                if num_bytes > max_bytes:
                    raise Invalid(
                        f"in a batch, an answer may have at most {max_bytes} bytes: split the "
                        "request"
                    )
                incoming.raw.charge(len(part))
            if data:
                await writer.write(data)
    if writer.status < 400:
        usage.report(record)
        record.record_end("stop", clock.monotonic())
    else:
        record.record_end("error", clock.monotonic(), f"the server's status is {writer.status}")
    await writer.end(usage.rest())


class ForwardedAnswer:
    """The answer of a server to a forwarded request. If the server or its worker fails before
    anything of the answer has come, another one is asked."""

    def __init__(
        self,
        incoming: IncomingRequest,
        path: str,
        body: ForwardedBody,
        record: GenerationRecord,
    ) -> None:
        self._incoming = incoming
        self._model = incoming.model
        self._generation = incoming.model.generation_context
        self._path = path
        self._body = body
        self._record = record
        self._attributes = _attributes(incoming, body)
        self._failed: set[WorkerId] = set()
        self._epoch = 0

    async def parts(self) -> AsyncGenerator[ForwardedHead | bytes]:
        """Yield the head of the answer, then its body. Raises BatonError."""
        clock, config = self._generation.clock, self._generation.config
        give_up_at = clock.monotonic() + config.max_worker_wait_seconds
        num_failures, has_begun = 0, False
        while True:
            worker = await self._place()
            try:
                async with aclosing(self._ask(worker)) as parts:
                    async for part in parts:
                        has_begun = True
                        yield part
                self._generation.breakers.record_success([worker.id])
                return
            except BatonError as error:
                self._record_failure(worker, error)
                num_failures += not isinstance(error, NotFound | Overloaded)
                # A request can't be isolated here, so it ends once it may have killed as many
                # servers as any other may.
                is_last = num_failures >= MAX_WORKER_DEATHS or clock.monotonic() >= give_up_at
                if has_begun or not (error.retryable or isinstance(error, NotFound)):
                    raise
                if is_last:
                    raise final_error(error, self._epoch) from error
                log.warning(
                    "request_fails_over",
                    **self._record.log_fields,
                    epoch=self._epoch + 1,
                    error=str(error),
                    excluded=sorted(self._failed),
                )
            await clock.sleep(config.retry_pause_seconds)

    def _ask(self, worker: Member) -> AsyncGenerator[ForwardedHead | bytes]:
        adapter = self._model.adapter
        name = worker.server_api.model if adapter is None else adapter.name
        request = ForwardRequest(
            f"{self._incoming.id}/{self._epoch}",
            self._path,
            self._body.content_type,
            self._body.encode(name, self._attributes.salt),
            self._body.num_tokens,
        )
        return self._incoming.context.forward_client.forward(worker.address, request)

    def _record_failure(self, worker: Member, error: BatonError) -> None:
        now = self._generation.clock.monotonic()
        self._failed.add(worker.id)
        self._record.record_failure(str(error), now)
        if not isinstance(error, NotFound | Overloaded):
            self._generation.breakers.record_failure([worker.id], now)

    # -- placement ---------------------------------------------------------------------------

    async def _place(self) -> Member:
        """Place the request on a worker whose server offers the path. After a failure, or while a
        worker may soon be ready, wait until there is one. Raises Unavailable, Overloaded, Invalid
        or DeadlineExceeded."""
        clock, config = self._generation.clock, self._generation.config
        give_up_at = clock.monotonic() + config.max_worker_wait_seconds
        pause = config.retry_pause_seconds
        self._epoch += 1
        while True:
            try:
                return await self._find_worker()
            except Unavailable:
                waits = self._epoch > 1 or self._generation.expects_workers()
                if not waits or clock.monotonic() >= give_up_at:
                    raise
            pause = min(2 * pause, MAX_WAIT_BACKOFF_SECONDS)
            await clock.sleep(pause)

    async def _find_worker(self) -> Member:
        everybody = self._model.workers.ready_workers(lambda kind: True)
        offering = {
            each.id: each
            for each in _with_adapter(self._model, everybody)
            if self._path in each.server_api.paths
        }
        if not offering:
            raise Unavailable(f"no server that offers {self._path} is ready")
        others = frozenset(each.id for each in everybody) - offering.keys()
        self._record.record_query(Epoch(self._epoch), self._generation.clock.monotonic())
        placement = await self._find_placement(offering.values(), others)
        worker = offering.get(placement.workers[0].id)
        if worker is None:
            raise Unavailable(f"worker {placement.workers[0].id} does not offer {self._path}")
        now = self._generation.clock.monotonic()
        self._record.record_placement(Epoch(self._epoch), placement, now)
        self._generation.breakers.record_placement([worker.id], now)
        return worker

    async def _find_placement(
        self, offering: Iterable[Member], others: frozenset[WorkerId]
    ) -> Placement:
        """Query the placer: first without the workers that all requests should avoid and those on
        which this one failed, then without the latter, then without either."""
        avoided = self._generation.avoided_workers()
        failed = frozenset(self._failed)
        failure: BatonError | None = None
        for excluded in dict.fromkeys((failed | avoided, failed, frozenset[WorkerId]())):
            try:
                return await self._query(offering, others | excluded)
            except (Unavailable, Overloaded) as error:
                failure = error
        assert failure is not None
        raise failure

    async def _query(self, offering: Iterable[Member], excluded: frozenset[WorkerId]) -> Placement:
        keys = self._body.prefix_keys(self._key_root())
        block_tokens = max((each.block_tokens for each in offering), default=0) or 1
        limit = max(self._model.workers.max_model_tokens - 1, 1)
        num_tokens = min(max(self._body.num_tokens, len(keys) * block_tokens, 1), limit)
        query = PlacementQuery(
            request_id=self._record.request_id,
            epoch=Epoch(self._epoch),
            tenant=self._incoming.tenant,
            num_tokens=num_tokens,
            max_new_tokens=1,  # one worker serves the whole request
            block_keys=keys[: num_tokens // block_tokens],
            excluded=excluded,
            model=self._model.name,
            trace=self._record.query_span(self._epoch).traceparent if self._record.trace else "",
            session=make_session_id(self._incoming.tenant, self._body.cache_key),
            adapter=self._model.adapter,
        )
        seconds = self._generation.config.placement_timeout_seconds
        try:
            with TimeLimit(seconds):
                return await self._generation.placer.place(query)
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"no worker was assigned to the request within {seconds:g} s"
            ) from error

    def _key_root(self) -> bytes:
        adapter = self._model.adapter
        return self._attributes.salt + (b"" if adapter is None else adapter.digest)


def _attributes(incoming: IncomingRequest, body: ForwardedBody) -> TenantAttributes:
    context = incoming.context
    tenant = context.tenants.authenticator.directory.tenant(incoming.tenant)
    return tenant.attributes(context.config.tenant_secret, body.cache_salt, incoming.min_priority)
