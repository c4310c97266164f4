"""The routes. What is behind them knows nothing of FastAPI."""

from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from importlib.metadata import version

import orjson
from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from baton.core.browser_guard import BrowserGuard
from baton.errors import BatonError
from baton.proof import PROOF_KEY
from router.admin import add_pools, check_admin
from router.batches.desk import Desk
from router.batches.routes import add_batches
from router.cors import Cors
from router.exchange import (
    ChatExchange,
    CompletionExchange,
    DetokenizeExchange,
    Exchange,
    TokenizeExchange,
)
from router.front import Front, open_access_log
from router.openapi.document import document_bytes
from router.page_check import PageCheck
from router.peers import ASKED_BY_PEER, path_of
from router.problem import Problem, problem_of
from router.service import Service
from router.tenants.routes import add_usage

ANSWERS: Mapping[str, type[Exchange]] = {
    "/v1/chat/completions": ChatExchange,
    "/v1/completions": CompletionExchange,
    "/tokenize": TokenizeExchange,
    "/detokenize": DetokenizeExchange,
}
"""POST routes whose bodies are read by their exchange."""


def build_app(service: Service, desk: Desk | None = None) -> Front:
    """All that the router answers, as an ASGI app; files and batches only with a ``desk``."""
    config = service.config
    return Front(
        build_routes(service, desk),
        {path: partial(exchange, service) for path, exchange in ANSWERS.items()},
        Cors(config.cors_origins),
        PageCheck(service.doorkeeper, BrowserGuard(config.cors_origins, config.known_hosts)),
        service.clock,
        service.own_id,
        lambda: service.draining,
        open_access_log(config.access_log),
    )


def build_routes(service: Service, desk: Desk | None = None) -> FastAPI:
    """Bodies are read and checked by :mod:`router.exchange`, so FastAPI's own schema of them
    would say nothing; it is off."""
    app = FastAPI(title="Baton", docs_url=None, redoc_url=None, openapi_url=None)
    _add_answers(app, service)
    _add_models(app, service)
    _add_operations(app, service)
    add_pools(app, service)
    add_usage(app, service)
    if desk is not None:
        add_batches(app, service, desk)
    _add_error_forms(app)
    return app


def _add_answers(app: FastAPI, service: Service) -> None:
    for path, exchange in ANSWERS.items():
        app.post(path)(_answerer(exchange, service))


def _answerer(
    exchange: type[Exchange], service: Service
) -> Callable[[], Coroutine[None, None, Response]]:
    async def answer() -> Response:
        return exchange(service)

    return answer


def _add_models(app: FastAPI, service: Service) -> None:
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


def _add_operations(app: FastAPI, service: Service) -> None:
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
        return Response(document_bytes(version("baton")), media_type="application/json")

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        # It tells who the tenants are, and what they use.
        service.doorkeeper.check_metrics(request.headers.get("authorization"))
        return Response(service.metrics.render(), media_type=service.metrics.content_type)

    @app.get("/admin/requests/{request_id}")
    async def explain(request: Request, request_id: str) -> Response:
        proof = request.headers.get(PROOF_KEY)
        if service.peers is not None and proof is not None:
            service.peers.check(path_of(request_id), proof)
        else:
            check_admin(service, request)
        explained = service.records.explain(request_id)
        if explained is None and service.peers and ASKED_BY_PEER not in request.headers:
            explained = await service.peers.explain(request_id)
        if explained is None:
            raise Problem(404, f"no such request is remembered: {request_id}")
        return _json(explained)


def _add_error_forms(app: FastAPI) -> None:
    async def on_problem(_request: Request, error: Exception) -> Response:
        return _problem(problem_of(error))

    async def on_http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        what = f"{request.method} {request.url.path}"
        headers = {name.lower(): value for name, value in (error.headers or {}).items()}
        message = {
            404: f"Unknown route: {what}; GET /openapi.json tells those that there are",
            405: f"Wrong method: {what}; it takes {headers.get('allow', 'another')}",
        }
        text = message.get(error.status_code, error.detail)
        return _problem(Problem(error.status_code, text, headers=headers))

    app.add_exception_handler(Problem, on_problem)
    app.add_exception_handler(BatonError, on_problem)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(Exception, on_problem)


def _problem(problem: Problem) -> Response:
    return Response(
        problem.json, problem.status, headers=problem.headers, media_type="application/json"
    )


def _json(value: object, status: int = 200) -> Response:
    return Response(orjson.dumps(value), status, media_type="application/json")
