"""The ops server: an HTTP server in each process for kubelet, Prometheus and administrators.

| request | answer |
|---|---|
| ``GET /startupz`` | 200 once the program has begun to serve; until then 503, with its progress |
| ``GET /readyz`` | 200 while the program serves and is not draining |
| ``GET /livez`` | 200 unless the program's event loop, or loading the weights, has stalled |
| ``GET /metrics`` | Prometheus text |

The server runs in threads of its own, and starts before anything is loaded. A native call that
never releases the GIL stops these threads, too; then there is no answer at all.
"""

import sys
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import AF_INET, AF_INET6
from socketserver import TCPServer
from typing import Any

import structlog
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from baton.errors import Unavailable
from baton.network.address import host_port
from baton.network.browser_guard import BrowserGuard
from baton.network.listeners import NO_AUTHENTICATION, announce_listener
from baton.obs.lost_writes import LOST_WRITES
from baton.obs.metric_aliases import MetricAlias, render_metrics
from baton.serve.process_health import ProcessHealth

log = structlog.get_logger(__name__)

MAX_REQUESTS = 16
"""Maximum number of concurrent requests: three probes and some scrapes. Further connections are
closed at once, to bound the number of threads."""

REQUEST_TIMEOUT_SECONDS = 5.0
"""Timeout for a peer to send its request, and to read the answer."""

CLOSE_POLL_SECONDS = 0.1
"""Interval at which the server checks whether it was closed."""

TEXT = "text/plain; charset=utf-8"

OpsResponse = tuple[HTTPStatus, str, bytes]


class OpsServer:
    """Answers the requests in the table at the top of this module. Call :meth:`open`, then
    :meth:`attach_program`, and :meth:`close` at the end."""

    def __init__(
        self,
        health: ProcessHealth,
        hang_timeout_seconds: float,
        guard: BrowserGuard | None = None,
        aliases: Sequence[MetricAlias] = (),
    ) -> None:
        """``guard`` checks the Host header; if it is None, any host is accepted. Metrics are also
        served under their ``aliases``."""
        self._aliases = aliases
        self.health = health
        self.guard = guard or BrowserGuard()
        self._hang_timeout_seconds = hang_timeout_seconds
        self._registry = CollectorRegistry()
        self._registry.register(HealthCollector(health))
        ProcessCollector(registry=self._registry)
        self._server: _Server | None = None
        self._hang = ""

    def open(self, host: str, port: int) -> str:
        """Start to listen, and return host:port. Raises Unavailable if it can't listen there."""
        try:
            self._server = _Server(self, host, port)
        except OSError as error:
            reason = error.strerror or error
            raise Unavailable(f"ops_port: can't listen on {host}:{port}: {reason}") from error
        serve = partial(self._server.serve_forever, poll_interval=CLOSE_POLL_SECONDS)
        threading.Thread(target=serve, name="ops", daemon=True).start()
        address = host_port(host, self._server.server_address[1])
        announce_listener("ops", address, NO_AUTHENTICATION)
        return address

    def attach_program(self, metrics: Collector) -> None:
        """From now on, serve the program's ``metrics``, too."""
        self._registry.register(metrics)

    def close(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()

    # -- answers, from any thread -------------------------------------------------------------

    def get(self, path: str) -> OpsResponse:
        if path == "/startupz":
            return self._status(self.health.has_served)
        if path == "/readyz":
            return self._status(self.health.is_ready)
        if path == "/livez":
            return self._live()
        if path == "/metrics":
            return HTTPStatus.OK, CONTENT_TYPE_LATEST, render_metrics(self._registry, self._aliases)
        return _not_found(path)

    def _live(self) -> OpsResponse:
        hang = self.health.describe_hang(self._hang_timeout_seconds)
        if hang and not self._hang:
            log.error("process_hangs", reason=hang)
        self._hang = hang
        if hang:
            return HTTPStatus.SERVICE_UNAVAILABLE, TEXT, f"{hang}\n".encode()
        return self._status(True)

    def _status(self, ok: bool) -> OpsResponse:
        status = HTTPStatus.OK if ok else HTTPStatus.SERVICE_UNAVAILABLE
        return status, TEXT, f"{self.health.describe()}\n".encode()


class HealthCollector(Collector):
    def __init__(self, health: ProcessHealth) -> None:
        self._health = health

    def collect(self) -> Iterator[Metric]:
        vitals = self._health
        state = GaugeMetricFamily(
            "baton_program_state", "1 for the state that the program is in.", labels=["state"]
        )
        state.add_metric([vitals.state], 1)
        yield state
        loading = vitals.loading
        loaded = GaugeMetricFamily("baton_loaded_bytes", "Bytes of the weights that are loaded.")
        loaded.add_metric([], loading.done_bytes if loading is not None else 0)
        yield loaded
        lost = CounterMetricFamily(
            "baton_lost_writes",
            "Writes to the log and other output that failed, by file.",
            labels=["file"],
        )
        for file, writes in {"stderr": 0, **LOST_WRITES.counts}.items():
            lost.add_metric([file], writes)
        yield lost
        pending = GaugeMetricFamily(
            "baton_settings_pending",
            "Settings in the config file that are not applied: the number that need a restart, and "
            "1 if the file was rejected.",
            labels=["reason"],
        )
        pending.add_metric(["restart"], len(vitals.settings.get("restart_needed", ())))
        pending.add_metric(["rejected"], int("rejected" in vitals.settings))
        yield pending


def _not_found(path: str) -> OpsResponse:
    paths = "/startupz, /readyz, /livez, /metrics"
    return (
        HTTPStatus.NOT_FOUND,
        TEXT,
        f"unknown path {path[:100]}; the paths are {paths}\n".encode(),
    )


# -- HTTP ----------------------------------------------------------------------------------------


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = MAX_REQUESTS

    def __init__(self, ops: OpsServer, host: str, port: int) -> None:
        self.ops = ops
        self.address_family = AF_INET6 if ":" in host else AF_INET
        self._slots = threading.BoundedSemaphore(MAX_REQUESTS)
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        """Bind the socket without the DNS query for this host's name that HTTPServer makes."""
        TCPServer.server_bind(self)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._slots.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # the thread could not be started
            self._slots.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log the error, for example a bug in a metrics collector, unless the peer just
        disconnected."""
        if not isinstance(sys.exception(), OSError):
            log.error("ops_request_failed", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = REQUEST_TIMEOUT_SECONDS
    server_version, sys_version = "baton", ""

    def do_GET(self) -> None:
        refusal = self._refusal()
        if refusal:
            self._send(HTTPStatus.FORBIDDEN, TEXT, f"{refusal}\n".encode())
        else:
            self._send(*self.server.ops.get(self.path.partition("?")[0]))

    def _refusal(self) -> str:
        names = ("host", "origin", "sec-fetch-site")
        host, origin, site = (self.headers.get(name) for name in names)
        return self.server.ops.guard.refusal(
            *(None if each is None else each.encode() for each in (host, origin, site))
        )

    def _send(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: probes come every few seconds."""
