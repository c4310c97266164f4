"""The router's HTTP routes. Only this module, the admin routes and the batch routes depend on
FastAPI."""

from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from importlib.metadata import version

import orjson
from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from baton.errors import BatonError
from baton.network.browser_guard import BrowserGuard
from baton.network.call_signing import PROOF_HEADER
from router.admin.routes import add_admin_routes, check_admin
from router.admin.usage_routes import add_usage_routes
from router.anthropic.request_handler import CountTokensHandler, MessagesHandler
from router.api_document.document import encode_document
from router.batches.routes import add_batch_routes
from router.batches.service import BatchService
from router.errors import ApiError, to_api_error
from router.http.api_key_header import api_key_header
from router.http.browser_check import BrowserRequestCheck
from router.http.cors import Cors
from router.http.frontend import HttpFrontend, open_access_log
from router.http.peer_routers import PEER_HEADER, explain_path
from router.openai.context import RouterContext
from router.openai.model_description import describe_model, describe_models
from router.openai.request_handler import (
    ChatHandler,
    CompletionHandler,
    DetokenizeHandler,
    RequestHandler,
    TokenizeHandler,
)

HANDLERS: Mapping[str, type[RequestHandler]] = {
    "/v1/chat/completions": ChatHandler,
    "/v1/completions": CompletionHandler,
    "/tokenize": TokenizeHandler,
    "/detokenize": DetokenizeHandler,
    "/v1/messages": MessagesHandler,
    "/v1/messages/count_tokens": CountTokensHandler,
}
"""POST routes whose handlers read the request body themselves."""


def build_app(context: RouterContext, batch_service: BatchService | None = None) -> HttpFrontend:
    """Build the router's ASGI app; file and batch routes exist only with a ``batch_service``."""
    config = context.config
    return HttpFrontend(
        build_routes(context, batch_service),
        {path: partial(handler_class, context) for path, handler_class in HANDLERS.items()},
        Cors(config.cors_origins),
        BrowserRequestCheck(
            context.tenants.authenticator, BrowserGuard(config.cors_origins, config.known_hosts)
        ),
        context.clock,
        context.ids.instance_id,
        lambda: context.draining,
        open_access_log(config.access_log),
    )


def build_routes(context: RouterContext, batch_service: BatchService | None = None) -> FastAPI:
    """Build the FastAPI routes. FastAPI's own OpenAPI schema is off: handlers read and check
    request bodies themselves (:mod:`router.openai.request_handler`), so FastAPI knows none."""
    app = FastAPI(title="Baton", docs_url=None, redoc_url=None, openapi_url=None)
    _add_handler_routes(app, context)
    _add_models(app, context)
    _add_operations(app, context)
    add_admin_routes(app, context)
    add_usage_routes(app, context)
    if batch_service is not None:
        add_batch_routes(app, context, batch_service)
    _add_error_handlers(app)
    return app


def _add_handler_routes(app: FastAPI, context: RouterContext) -> None:
    for path, handler_class in HANDLERS.items():
        app.post(path)(_handler_endpoint(handler_class, context))


def _handler_endpoint(
    handler_class: type[RequestHandler], context: RouterContext
) -> Callable[[], Coroutine[None, None, Response]]:
    async def endpoint() -> Response:
        return handler_class(context)

    return endpoint


def _add_models(app: FastAPI, context: RouterContext) -> None:
    created = context.clock.wall_nanoseconds() // 1_000_000_000

    def describe() -> dict[str, object]:
        model, max_tokens = context.config.model, context.cluster.max_model_tokens
        return describe_model(model, created, max_tokens)

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        context.tenants.authenticator.tenant_of(api_key_header(request.scope))
        return _json(describe_models([describe()]))

    @app.get("/v1/models/{name:path}")
    async def model(request: Request, name: str) -> Response:
        context.tenants.authenticator.tenant_of(api_key_header(request.scope))
        context.check_model(name)
        return _json(describe())


def _add_operations(app: FastAPI, context: RouterContext) -> None:
    @app.get("/health")
    async def health() -> Response:
        return _json({"status": "ok"})

    @app.get("/ready")
    async def ready() -> Response:
        if context.draining:
            return _json({"ready": False, "reason": "draining"}, 503)
        if not context.cluster.is_ready:
            return _json({"ready": False, "reason": "no decode worker is ready"}, 503)
        return _json({"ready": True})

    @app.get("/openapi.json")
    async def openapi() -> Response:
        return Response(encode_document(version("baton")), media_type="application/json")

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
            raise ApiError(404, f"no record of request {request_id} (it may be too old)")
        return _json(explanation)


def _add_error_handlers(app: FastAPI) -> None:
    async def on_api_error(_request: Request, error: Exception) -> Response:
        return _error_response(to_api_error(error))

    async def on_http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        request_line = f"{request.method} {request.url.path}"
        headers = {name.lower(): value for name, value in (error.headers or {}).items()}
        message = {
            404: f"Unknown route: {request_line}; GET /openapi.json lists all routes",
            405: f"Method not allowed: {request_line}; allowed: {headers.get('allow', 'unknown')}",
        }
        text = message.get(error.status_code, error.detail)
        return _error_response(ApiError(error.status_code, text, headers=headers))

    app.add_exception_handler(ApiError, on_api_error)
    app.add_exception_handler(BatonError, on_api_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(Exception, on_api_error)


def _error_response(error: ApiError) -> Response:
    return Response(error.json, error.status, headers=error.headers, media_type="application/json")


def _json(value: object, status: int = 200) -> Response:
    return Response(orjson.dumps(value), status, media_type="application/json")
