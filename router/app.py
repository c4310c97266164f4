"""The routes. What is behind them knows nothing of FastAPI."""

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
from router.api_document.document import encode_document
from router.batches.routes import add_batch_routes
from router.batches.service import BatchService
from router.errors import ApiError, to_api_error
from router.http.browser_check import BrowserRequestCheck
from router.http.cors import Cors
from router.http.frontend import HttpFrontend, open_access_log
from router.http.peer_routers import PEER_HEADER, explain_path
from router.openai.context import RouterContext
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
}
"""POST routes whose bodies are read by their exchange."""


def build_app(service: RouterContext, desk: BatchService | None = None) -> HttpFrontend:
    """All that the router answers, as an ASGI app; files and batches only with a ``desk``."""
    config = service.config
    return HttpFrontend(
        build_routes(service, desk),
        {path: partial(exchange, service) for path, exchange in HANDLERS.items()},
        Cors(config.cors_origins),
        BrowserRequestCheck(
            service.doorkeeper, BrowserGuard(config.cors_origins, config.known_hosts)
        ),
        service.clock,
        service.own_id,
        lambda: service.draining,
        open_access_log(config.access_log),
    )


def build_routes(service: RouterContext, desk: BatchService | None = None) -> FastAPI:
    """Bodies are read and checked by :mod:`router.openai.request_handler`, so FastAPI's own schema
    of them would say nothing; it is off."""
    app = FastAPI(title="Baton", docs_url=None, redoc_url=None, openapi_url=None)
    _add_handler_routes(app, service)
    _add_models(app, service)
    _add_operations(app, service)
    add_admin_routes(app, service)
    add_usage_routes(app, service)
    if desk is not None:
        add_batch_routes(app, service, desk)
    _add_error_handlers(app)
    return app


def _add_handler_routes(app: FastAPI, service: RouterContext) -> None:
    for path, exchange in HANDLERS.items():
        app.post(path)(_handler_endpoint(exchange, service))


def _handler_endpoint(
    exchange: type[RequestHandler], service: RouterContext
) -> Callable[[], Coroutine[None, None, Response]]:
    async def answer() -> Response:
        return exchange(service)

    return answer


def _add_models(app: FastAPI, service: RouterContext) -> None:
    created = service.clock.wall_nanoseconds() // 1_000_000_000

    def describe() -> dict[str, object]:
        return {
            "id": service.config.model,
            "object": "model",
            "created": created,
            "owned_by": "baton",
            "max_model_len": service.cluster.max_model_tokens,
        }

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        service.doorkeeper.tenant_of(request.headers.get("authorization"))
        return _json({"object": "list", "data": [describe()]})

    @app.get("/v1/models/{name:path}")
    async def model(request: Request, name: str) -> Response:
        service.doorkeeper.tenant_of(request.headers.get("authorization"))
        service.check_model(name)
        return _json(describe())


def _add_operations(app: FastAPI, service: RouterContext) -> None:
    @app.get("/health")
    async def health() -> Response:
        return _json({"status": "ok"})

    @app.get("/ready")
    async def ready() -> Response:
        if service.draining:
            return _json({"ready": False, "reason": "draining"}, 503)
        if not service.cluster.is_ready:
            return _json({"ready": False, "reason": "no decode worker is ready"}, 503)
        return _json({"ready": True})

    @app.get("/openapi.json")
    async def openapi() -> Response:
        return Response(encode_document(version("baton")), media_type="application/json")

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        # It tells who the tenants are, and what they use.
        service.doorkeeper.check_metrics(request.headers.get("authorization"))
        return Response(service.metrics.render(), media_type=service.metrics.content_type)

    @app.get("/admin/requests/{request_id}")
    async def explain(request: Request, request_id: str) -> Response:
        proof = request.headers.get(PROOF_HEADER)
        if service.peers is not None and proof is not None:
            service.peers.check(explain_path(request_id), proof)
        else:
            check_admin(service, request)
        explained = service.records.explain(request_id)
        if explained is None and service.peers and PEER_HEADER not in request.headers:
            explained = await service.peers.explain(request_id)
        if explained is None:
            raise ApiError(404, f"no such request is remembered: {request_id}")
        return _json(explained)


def _add_error_handlers(app: FastAPI) -> None:
    async def on_problem(_request: Request, error: Exception) -> Response:
        return _error_response(to_api_error(error))

    async def on_http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        what = f"{request.method} {request.url.path}"
        headers = {name.lower(): value for name, value in (error.headers or {}).items()}
        message = {
            404: f"Unknown route: {what}; GET /openapi.json tells those that there are",
            405: f"Wrong method: {what}; it takes {headers.get('allow', 'another')}",
        }
        text = message.get(error.status_code, error.detail)
        return _error_response(ApiError(error.status_code, text, headers=headers))

    app.add_exception_handler(ApiError, on_problem)
    app.add_exception_handler(BatonError, on_problem)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(Exception, on_problem)


def _error_response(problem: ApiError) -> Response:
    return Response(
        problem.json, problem.status, headers=problem.headers, media_type="application/json"
    )


def _json(value: object, status: int = 200) -> Response:
    return Response(orjson.dumps(value), status, media_type="application/json")
