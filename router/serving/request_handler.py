"""Handles one HTTP request that has a body: authenticates and admits it, reads the body, and
encodes errors."""

from collections.abc import Callable, Coroutine, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, TypeVar

import structlog
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from baton.concurrency.time_limit import TimeLimit
from baton.core.ids import TenantId
from baton.core.priority import MAX_PRIORITY_STEPS
from baton.errors import BatonError, DeadlineExceeded
from router.errors import ApiError, to_api_error
from router.http.api_key_header import api_key_header
from router.http.body_parser import parse_body
from router.http.ignored_fields import IgnoredFields
from router.http.json_limits import max_json_values
from router.http.raw_body import RawBody
from router.http.response_writer import (
    CLIENT_CLOSED_REQUEST,
    INLINE_WRITER_KEY,
    JSON_HEADERS,
    JSON_TYPE,
    REQUEST_ID_KEY,
    ClientDisconnected,
    ResponseWriter,
    cancel_on_disconnect,
    content_length,
    get_header,
    read_body,
)
from router.serving.context import RouterContext
from router.serving.event_cursor import LAST_EVENT_ID
from router.serving.resumption import IDEMPOTENCY_KEY, ResumeHeaders
from router.serving.schema.strict_model import RequestBody
from router.serving.served_model import ServedModel
from router.telemetry.metrics import UNKNOWN_MODEL
from router.telemetry.tracing import RequestTrace
from router.tenants.admission import RequestAdmission

log = structlog.get_logger(__name__)

Body = TypeVar("Body", bound=RequestBody)
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class ErrorForm:
    """How an API writes errors: as the body of a response, and as the last events of a stream. Both
    functions get the error and the id by which the client and the logs know the request, which may
    be empty. All responses have this id in the header ``request_id_header``, if the API has one."""

    encode: Callable[[ApiError, str], bytes]
    encode_event: Callable[[ApiError, str], bytes]
    request_id_header: str | None = None


OPENAI_ERRORS = ErrorForm(
    lambda error, _id: error.json, lambda error, _id: b"data: " + error.json + b"\n\n"
)


_IDEMPOTENCY_KEY, _LAST_EVENT_ID = IDEMPOTENCY_KEY.lower().encode(), LAST_EVENT_ID.lower().encode()


@dataclass(frozen=True, slots=True)
class Endpoint:
    """What is done with the requests of one route. ``name`` is its label in metrics. ``answer``
    answers a request, and raises ApiError or BatonError; it may release the request's ``raw`` body
    before the end, as soon as the body is not needed any more. ``is_form`` says that bodies are
    multipart forms, and not JSON."""

    name: str
    answer: "Callable[[IncomingRequest], Coroutine[Any, Any, None]]"
    errors: ErrorForm = OPENAI_ERRORS
    is_form: bool = False


@dataclass(slots=True)
class IncomingRequest:
    """A request that is admitted and whose body is read. ``headers`` are those of the response.
    ``model`` is known once the body is parsed, and ``id``, the ``x-baton-request-id``, once an
    answer is begun. ``encode_failure`` encodes the end of a stream that fails. ``resume`` has the
    headers of a request with an ``Idempotency-Key``; ``body_digest`` identifies its body once that
    is parsed. ``created`` is when its answer was first begun, in Unix seconds, if that was over
    another connection."""

    context: RouterContext
    endpoint: Endpoint
    writer: ResponseWriter
    admission: RequestAdmission
    raw: RawBody
    headers: dict[str, str]
    ignored: IgnoredFields
    encode_failure: Callable[[ApiError], bytes]
    content_type: str = JSON_TYPE
    traceparent: str | None = None
    min_priority: int = 0
    id: str = ""
    found_model: ServedModel | None = None
    trace: RequestTrace | None = None
    resume: ResumeHeaders | None = None
    body_digest: bytes = b""
    created: int | None = None

    @property
    def tenant(self) -> TenantId:
        return self.admission.tenant.id

    @property
    def model(self) -> ServedModel:
        assert self.found_model is not None, "parse() comes first"
        return self.found_model

    @property
    def unix_seconds(self) -> int:
        if self.created is not None:
            return self.created
        return self.context.clock.wall_nanoseconds() // 1_000_000_000

    def begin(self, request_id: str) -> None:
        """Begin an answer, under this id."""
        self.id = self.headers["x-baton-request-id"] = request_id
        tracer = self.context.telemetry.tracer
        if tracer is not None:
            self.trace = tracer.begin(request_id, self.traceparent)

    async def parse(
        self,
        schema: type[Body],
        convert: Callable[[Body], Result],
        *,
        rounds_integers: bool = False,
    ) -> tuple[Body, Result]:
        """Parse the body, convert it, free its bytes, and find the model that it names. The
        response's headers will name the fields that were ignored. ``rounds_integers`` says that
        answers repeat values of the body. Raises ApiError (400, 404)."""
        context, data, ignored = self.context, self.raw.take(), self.ignored
        max_values = max_json_values(context.models.max_model_tokens)

        def work() -> tuple[Body, Result]:
            if self.resume is not None:
                self.body_digest = sha256(b"%b\n%b" % (self.endpoint.name.encode(), data)).digest()
            body = parse_body(schema, data, max_values, ignored, rounds_integers=rounds_integers)
            return body, convert(body)

        body, result = await context.resources.offload_executor.run(
            self.tenant, self.raw.size_bytes, work
        )
        self.report_ignored_fields()
        directory = context.tenants.authenticator.directory
        self.found_model = context.models.find(body.model, directory.tenant(self.tenant))
        return body, result

    async def tokenize(self, call: Callable[[], Result]) -> Result:
        """Run ``call``, which tokenises text of the body."""
        return await self.context.resources.offload_executor.tokenize(
            self.model.name,
            self.tenant,
            self.model.text.tokenizing_bytes(self.raw.size_bytes),
            call,
        )

    def report_ignored_fields(self, names: Iterable[str] = ()) -> None:
        """Report all ignored fields so far, and ``names``, in the response's headers and the
        log."""
        for name in names:
            self.ignored.add(name)
        self.headers |= self.ignored.headers()
        self.context.telemetry.ignored_fields_log.write(self.tenant, self.ignored.names)

    async def respond(self, data: bytes) -> None:
        await self.writer.respond(200, JSON_HEADERS | self.headers, data)

    def end_trace(self, status: int) -> None:
        tracer, trace = self.context.telemetry.tracer, self.trace
        if trace is not None and tracer is not None:
            tracer.end(trace, self.endpoint.name, status)

    def detach(self) -> ExitStack:
        """Return a stack that now holds the request's admission, its share of the body budget, and
        its trace, so that they outlast the response. The caller closes the stack when the request's
        work has ended."""
        held = ExitStack()
        held.callback(self.admission.detach())
        held.callback(self.raw.detach())
        tracer, trace, self.trace = self.context.telemetry.tracer, self.trace, None
        if trace is not None and tracer is not None:
            held.callback(tracer.end, trace, self.endpoint.name, 200)
        return held


class RequestHandler(Response):
    """Handles one HTTP request to an endpoint. The class is a Starlette response, so that it gets
    the raw ASGI channel: no layer in between delays the message that the client has
    disconnected."""

    def __init__(self, context: RouterContext, endpoint: Endpoint) -> None:
        super().__init__()
        self._context = context
        self.endpoint = endpoint
        self._response_headers: dict[str, str] = {}
        self._log_id = ""
        self._incoming: IncomingRequest | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer = ResponseWriter(send, scope[INLINE_WRITER_KEY])
        self._log_id = scope.get(REQUEST_ID_KEY, "")
        header = self.endpoint.errors.request_id_header
        if header is not None:
            self._response_headers[header] = self._log_id
        try:
            await self._serve(scope, receive, writer)
        except ClientDisconnected:
            writer.status = CLIENT_CLOSED_REQUEST
        except (BatonError, ApiError) as error:
            failure = to_api_error(error, self._log_id)
            await writer.send_error(failure, self._response_headers, self)
        except Exception as error:
            log.exception("request_crashed", endpoint=self.endpoint.name, request_id=self._log_id)
            await writer.send_error(to_api_error(error), self._response_headers, self)
        finally:
            writer.stop_pings()
            self._record(self.endpoint.name, writer.status or CLIENT_CLOSED_REQUEST)

    async def _serve(self, scope: Scope, receive: Receive, writer: ResponseWriter) -> None:
        context, config = self._context, self._context.config
        context.check_not_draining()
        tenant = context.tenants.authenticator.tenant_of(api_key_header(scope))
        resume = ResumeHeaders.parse(
            get_header(scope, _IDEMPOTENCY_KEY), get_header(scope, _LAST_EVENT_ID)
        )
        admission = context.tenants.admission.create_admission(tenant, content_length(scope))
        await admission.draw_request_quota()
        with admission, context.raw_body(tenant) as raw:
            self._response_headers |= admission.headers()
            await read_body(
                scope,
                receive,
                raw,
                config.max_body_bytes,
                config.body_timeout_seconds,
                is_form=self.endpoint.is_form,
            )
            incoming = self._accept(writer, admission, raw)
            if self.endpoint.is_form:
                incoming.content_type = get_header(scope, b"content-type") or ""
            incoming.resume = resume
            if context.telemetry.tracer is not None:
                incoming.traceparent = get_header(scope, b"traceparent")
            try:
                with TimeLimit(config.request_timeout_seconds) as time_limit:
                    await cancel_on_disconnect(
                        scope[INLINE_WRITER_KEY], self.endpoint.answer(incoming)
                    )
            except TimeoutError as error:
                if not time_limit.expired:
                    raise
                raise _deadline_exceeded(config.request_timeout_seconds) from error

    async def answer_batch_request(
        self, take_body: Callable[[], bytes], tenant: TenantId
    ) -> tuple[int, bytes]:
        """Answer a request that comes from a batch instead of a connection, with the lowest
        priority. ``take_body`` returns its body, which counts against the budget for bodies from
        then on. Returns the HTTP status and body that a client would get. Errors are not raised but
        become a response."""
        chunks: list[bytes] = []

        async def collect(message: Message) -> None:
            chunks.append(message.get("body", b""))

        context, writer = self._context, ResponseWriter(collect)
        seconds = context.config.request_timeout_seconds
        try:
            admission = context.tenants.admission.create_admission(tenant, idle=True)
            with admission, context.raw_body(tenant) as raw, TimeLimit(seconds):
                raw.add(take_body())
                incoming = self._accept(writer, admission, raw)
                incoming.min_priority = MAX_PRIORITY_STEPS
                await self.endpoint.answer(incoming)
        except Exception as error:
            if not isinstance(error, BatonError | ApiError | TimeoutError):
                log.exception("request_crashed", endpoint=self.endpoint.name)
            if isinstance(error, TimeoutError):
                error = _deadline_exceeded(seconds)
            chunks.clear()  # of an answer that has begun, and is not complete
            writer = ResponseWriter(collect)
            await writer.send_error(to_api_error(error), {}, self)
        self._record("batches", writer.status)
        return writer.status, b"".join(chunks)

    def _accept(
        self, writer: ResponseWriter, admission: RequestAdmission, raw: RawBody
    ) -> IncomingRequest:
        errors, log_id = self.endpoint.errors, self._log_id
        self._incoming = IncomingRequest(
            self._context,
            self.endpoint,
            writer,
            admission,
            raw,
            self._response_headers,
            self._context.ignored_fields(admission.tenant.id),
            lambda error: errors.encode_event(error, log_id),
        )
        return self._incoming

    def _record(self, endpoint: str, status: int) -> None:
        incoming, label = self._incoming, UNKNOWN_MODEL
        if incoming is not None and incoming.found_model is not None:
            label = incoming.found_model.name
        self._context.telemetry.metrics.record_http_request(endpoint, label, status)
        if incoming is not None:
            incoming.end_trace(status)

    def encode_error(self, error: ApiError) -> bytes:
        return self.endpoint.errors.encode(error, self._log_id)

    def encode_error_event(self, error: ApiError) -> bytes:
        """Encode the end of a stream that fails: as the request's encoder does, once it has one."""
        if self._incoming is None:
            return self.endpoint.errors.encode_event(error, self._log_id)
        return self._incoming.encode_failure(error)

    @property
    def request_id(self) -> str:
        """The ``x-baton-request-id`` of the request; empty before it has one."""
        return "" if self._incoming is None else self._incoming.id


def _deadline_exceeded(seconds: float) -> DeadlineExceeded:
    return DeadlineExceeded(f"the answer was not complete within {seconds:g} s")
