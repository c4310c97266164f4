"""The router's HTTP routes. Only this module and the modules with the admin, batch and
stored-response routes depend on FastAPI."""

from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from importlib.metadata import version

import orjson
from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, Response
from starlette.exceptions import HTTPException
from starlette.routing import Match

from baton.core.credentials import ClusterCredentials
from baton.errors import BatonError
from baton.network.browser_guard import BrowserGuard
from baton.network.call_signing import PROOF_HEADER
from router.admin.adapter_routes import add_adapter_routes
from router.admin.routes import add_admin_routes, check_admin
from router.admin.usage_routes import add_usage_routes
from router.anthropic.endpoints import COUNT_TOKENS, MESSAGES
from router.api_document.document import encode_document
from router.api_document.pages import (
    PAGE_HEADERS,
    describe_server,
    routes_page,
    start_page,
)
from router.batches.routes import add_batch_routes
from router.batches.service import BatchService
from router.console.cluster_reader import PoolsReader, RemoteReader
from router.console.feed import ConsoleFeed
from router.console.routes import add_console_routes
from router.console.state import StateBuilder
from router.errors import ApiError, to_api_error
from router.forwarding.forward import SERVER_ENDPOINTS
from router.http.api_key_header import api_key_header
from router.http.browser_check import BrowserRequestCheck
from router.http.cors import Cors
from router.http.frontend import HttpFrontend, open_access_log
from router.http.peer_routers import PEER_HEADER, explain_path
from router.http.unsupported_paths import unsupported_reason
from router.openai.endpoints import CHATS, COMPLETIONS, DETOKENIZE, TOKENIZE
from router.responses.endpoints import input_tokens_endpoint, responses_endpoint
from router.responses.response_service import ResponseService
from router.responses.routes import add_response_routes
from router.serving.context import RouterContext
from router.serving.model_description import describe_adapter, describe_model, describe_models
from router.serving.request_handler import RequestHandler
from router.serving.served_model import ServedModel
from router.tenants.tenant import Tenant

OWN_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses")
"""The paths under which every model that generates can be used."""

HandlerFactory = Callable[[], RequestHandler]


def build_app(
    context: RouterContext,
    batch_service: BatchService | None = None,
    response_service: ResponseService | None = None,
    credentials: ClusterCredentials | str | None = None,
) -> HttpFrontend:
    """Build the router's ASGI app. File and batch routes exist only if ``batch_service`` is given,
    and responses are stored only if ``response_service`` is given. With the cluster's
    ``credentials``, the console also shows what conductors and stores report."""
    config = context.config
    return HttpFrontend(
        build_routes(context, batch_service, response_service, credentials),
        handler_factories(context, response_service),
        Cors(config.cors_origins),
        BrowserRequestCheck(
            context.tenants.authenticator, BrowserGuard(config.cors_origins, config.known_hosts)
        ),
        context.clock,
        context.ids.instance_id,
        lambda: context.draining,
        open_access_log(config.access_log),
    )


def handler_factories(
    context: RouterContext, response_service: ResponseService | None
) -> Mapping[str, HandlerFactory]:
    """Return, by path, the handler factories of the POST routes whose handlers read the request
    body themselves."""
    store = response_service.store if response_service is not None else None
    background = response_service.background if response_service is not None else None
    endpoints = {
        "/v1/chat/completions": CHATS,
        "/v1/completions": COMPLETIONS,
        "/v1/responses": responses_endpoint(store, background),
        "/v1/responses/input_tokens": input_tokens_endpoint(store),
        "/v1/messages": MESSAGES,
        "/v1/messages/count_tokens": COUNT_TOKENS,
        "/tokenize": TOKENIZE,
        "/detokenize": DETOKENIZE,
        **SERVER_ENDPOINTS,
    }
    return {path: partial(RequestHandler, context, each) for path, each in endpoints.items()}


def build_routes(
    context: RouterContext,
    batch_service: BatchService | None = None,
    response_service: ResponseService | None = None,
    credentials: ClusterCredentials | str | None = None,
) -> FastAPI:
    """Build the FastAPI routes. FastAPI's own OpenAPI schema is off: handlers read and check
    request bodies themselves (:mod:`router.serving.request_handler`), so FastAPI does not know the
    bodies' fields."""
    app = FastAPI(title="Baton", docs_url=None, redoc_url=None, openapi_url=None)
    for path, new_handler in handler_factories(context, response_service).items():
        app.post(path)(_handler_endpoint(new_handler))
    _add_models(app, context)
    _add_probes(app, context)
    _add_pages(app)
    _add_operations(app, context)
    add_admin_routes(app, context)
    if context.models.adapters is not None:
        add_adapter_routes(app, context, context.models.adapters)
    add_usage_routes(app, context)
    add_console_routes(app, context, _build_feed(context, credentials))
    add_response_routes(app, context, response_service)
    if batch_service is not None:
        add_batch_routes(app, context, batch_service)
    _add_error_handlers(app)
    return app


def _build_feed(
    context: RouterContext, credentials: ClusterCredentials | str | None
) -> ConsoleFeed:
    socket = context.config.control_socket
    builder = StateBuilder(
        context,
        RemoteReader(context.cluster, context.clock, credentials),
        PoolsReader(socket) if socket is not None else None,
    )
    return ConsoleFeed(builder.build, context.clock, lambda: context.draining)


def _handler_endpoint(new_handler: HandlerFactory) -> Callable[[], Coroutine[None, None, Response]]:
    async def endpoint() -> Response:
        return new_handler()

    return endpoint


def _add_models(app: FastAPI, context: RouterContext) -> None:
    created = context.clock.wall_nanoseconds() // 1_000_000_000

    def tenant_of(request: Request) -> Tenant:
        authenticator = context.tenants.authenticator
        return authenticator.directory.tenant(
            authenticator.tenant_of(api_key_header(request.scope))
        )

    def describe(model: ServedModel) -> dict[str, object]:
        has_lossy_codec = any(each.workers.kv_codec.is_lossy for each in context.models.all)
        return describe_model(
            model.name,
            created,
            model.workers.max_model_tokens,
            model.text.output_format.names,
            model.sampling_defaults,
            model.workers.kv_codec.value if has_lossy_codec else None,
            model.workers.paths(OWN_PATHS),
        )

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        tenant = tenant_of(request)
        models = [describe(model) for model in context.models.of_tenant(tenant)]
        adapters = [
            describe_adapter(each.ref.name, describe(context.models.by_name(each.model)))
            for each in context.models.adapters_of_tenant(tenant)
        ]
        return _json(describe_models([*models, *adapters]))

    @app.get("/v1/models/{name:path}")
    async def model(request: Request, name: str) -> Response:
        if not name:  # some clients put a slash after each path
            return await models(request)
        found = context.models.find(name, tenant_of(request))
        described = describe(found)
        if found.adapter is not None:
            described = describe_adapter(found.adapter.name, described)
        return _json(described)


def _add_probes(app: FastAPI, context: RouterContext) -> None:
    """Add the routes that report health, readiness and load, also under the paths that other
    servers use for them."""

    @app.get("/health")
    @app.get("/healthz")
    @app.get("/ping")
    @app.post("/ping")
    async def health() -> Response:
        return _json({"status": "ok"})

    @app.get("/ready")
    async def ready() -> Response:
        if context.draining:
            return _json({"ready": False, "reason": "draining"}, 503)
        models = {model.name: model.workers.is_ready for model in context.models.all}
        if not any(models.values()):
            return _json({"ready": False, "reason": "no decode worker is ready"}, 503)
        if not all(models.values()):
            return _json({"ready": True, "models": models})
        return _json({"ready": True})

    @app.get("/load")
    async def load(request: Request) -> Response:
        context.tenants.authenticator.tenant_of(request.headers.get("authorization"))
        return _json({"server_load": context.tenants.request_limiter.num_in_use})


def _add_pages(app: FastAPI) -> None:
    own_version = version("baton")

    @app.get("/")
    async def start(request: Request) -> Response:
        if "text/html" in request.headers.get("accept", ""):
            return HTMLResponse(start_page(own_version), headers=PAGE_HEADERS)
        return _json(describe_server(own_version))

    @app.get("/docs")
    async def docs() -> Response:
        return HTMLResponse(routes_page(own_version), headers=PAGE_HEADERS)

    @app.get("/version")
    async def show_version() -> Response:
        return _json({"version": own_version})

    @app.get("/openapi.json")
    async def openapi() -> Response:
        return Response(encode_document(own_version), media_type="application/json")


def _add_operations(app: FastAPI, context: RouterContext) -> None:
    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        # The metrics contain tenants' names and usage.
        context.tenants.authenticator.check_metrics(request.headers.get("authorization"))
        registry = context.telemetry.metrics
        return Response(registry.render(), media_type=registry.content_type)

    @app.get("/admin/requests/{request_id}")
    async def explain(request: Request, request_id: str) -> Response:
        proof = request.headers.get(PROOF_HEADER)
        peers = context.telemetry.peer_routers
        if peers is not None and proof is not None:
            peers.check(explain_path(request_id), proof)
        else:
            check_admin(context, request)
        explanation = context.telemetry.history.explain(request_id)
        if explanation is None and peers and PEER_HEADER not in request.headers:
            explanation = await peers.explain(request_id)
        if explanation is None:
            raise ApiError(404, f"there is no record of request {request_id}; it may be too old")
        return _json(explanation)


def _add_error_handlers(app: FastAPI) -> None:
    async def on_api_error(_request: Request, error: Exception) -> Response:
        return _error_response(to_api_error(error))

    async def on_http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        request_line = f"{request.method} {request.url.path}"
        headers = {name.lower(): value for name, value in (error.headers or {}).items()}
        reason = unsupported_reason(request.url.path)
        if reason is not None and error.status_code == 404:
            text = f"{request.url.path} is not supported: {reason}"
            return _error_response(ApiError(400, text, code="unsupported_endpoint"))
        hint = _path_hint(app, request)
        message = {
            404: f"Unknown route: {request_line}; {hint}GET /openapi.json lists all routes",
            405: f"Method not allowed: {request_line}; allowed: {headers.get('allow', 'unknown')}",
        }
        text = message.get(error.status_code, error.detail)
        return _error_response(ApiError(error.status_code, text, headers=headers))

    app.add_exception_handler(ApiError, on_api_error)
    app.add_exception_handler(BatonError, on_api_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(Exception, on_api_error)


def _path_hint(app: FastAPI, request: Request) -> str:
    """Name the route that a client with a wrong base URL means: its path lacks the ``/v1`` with
    which most paths begin, or has it twice, or has one where there is none. Return an empty string
    if there is no such route."""
    path = request.url.path
    for meant, reason in (
        (f"/v1{path}", "the path begins with /v1"),
        (path.removeprefix("/v1"), "the path has one /v1 too many"),
    ):
        scope = {**request.scope, "path": meant}
        if meant != path and any(each.matches(scope)[0] is Match.FULL for each in app.routes):
            return f"{reason}: {meant}; "
    return ""


def _error_response(error: ApiError) -> Response:
    return Response(error.json, error.status, headers=error.headers, media_type="application/json")


def _json(value: object, status: int = 200) -> Response:
    return Response(orjson.dumps(value), status, media_type="application/json")
