"""Serves the API over HTTPS, with one thread per connection."""

import json
import socket
import ssl
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import parse_qsl, unquote, urlsplit

import yaml

from tests.kube import discovery, protobuf, tables
from tests.kube.accounts import Accounts, Call
from tests.kube.api import Api
from tests.kube.execution import Channels, accepted, execute
from tests.kube.failures import Refused, bad_request
from tests.kube.kinds import ROLE, ROLE_BINDING, Object
from tests.kube.request import Request, parse_request
from tests.kube.subresources import subresource
from tests.kube.watching import watch

IDLE_SECONDS = 300.0
"""How long a connection may be idle."""

LONGEST_BODY = 16 * 2**20
"""The largest body in bytes. Helm keeps a whole release in one Secret of up to a megabyte."""

CHANGES = ("ADDED", "MODIFIED", "DELETED")
PROTOBUF = "application/com.github.proto-openapi.spec.v2@v1.0+protobuf"


class Containers(Protocol):
    """The part of a kubelet that the API server uses. An empty ``container`` stands for any
    container of the pod. All methods may raise Refused."""

    def log(self, namespace: str, pod: str, container: str) -> str:
        """Return the container's log."""
        ...

    def exec_command(
        self, namespace: str, pod: str, container: str, command: Sequence[str]
    ) -> tuple[list[str], Mapping[str, str]]:
        """Return a command line for this machine that runs ``command`` in the container, and its
        environment."""
        ...


class KubeServer:
    """Serves ``api``. ``on_request`` is called with each request, and may raise Refused, by which
    tests can inject errors."""

    def __init__(self, api: Api, containers: Containers | None = None) -> None:
        self.api = api
        self.accounts = Accounts(api.store)
        self.on_request: Callable[[Request], None] = lambda request: None
        self.paths: list[tuple[str, str]] = []
        """Method and path of each request, for debugging."""
        self.failures: list[str] = []
        self.containers = containers
        self.closed = threading.Event()
        self.url = ""

    @property
    def port(self) -> int:
        return urlsplit(self.url).port or 0

    @contextmanager
    def running(self, folder: Path, address: str = "127.0.0.1") -> Iterator["KubeServer"]:
        """Serve at ``address``, and write ``kubeconfig`` and ``ca.crt`` to ``folder``. The
        certificate is also valid for ``kubernetes.default.svc``, which pods use."""
        handler = type("Handler", (_Handler,), {"kube": self})
        server = _Server((address, 0), handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        certificates = Path(__file__).parent / "certificates"
        context.load_cert_chain(certificates / "server.crt", certificates / "server.key")
        context.sslsocket_class = _SelfClosingSocket
        server.context = context
        self.url = f"https://{address}:{server.server_port}"
        write_kubeconfig(folder, self.url)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield self
        finally:
            self.closed.set()
            server.shutdown()
            server.server_close()
            server.end_connections()
            thread.join()
        assert not self.failures, self.failures[0]

    def answer(self, request: Request, user: str) -> tuple[int, Object]:
        """Return the status code and the body of the response to a request other than a watch, log
        or exec. Raises Refused."""
        kind, name = request.kind, request.name
        if request.subresource:
            return subresource(self.api, request)
        if request.verb == "list":
            return 200, self.api.list_objects(request)
        if request.verb == "get":
            return 200, self.api.store.get(kind, request.namespace, name)
        if request.verb == "create":
            return 201, self.api.create(kind, request.body, request)
        if request.verb == "update":
            return 200, self.api.update(kind, request.body, request)
        if request.verb == "patch":
            return self.api.patch(request)
        if request.verb == "deletecollection":
            for each in self.api.select_objects(request):
                self.api.delete(kind, each["metadata"].get("namespace", ""),
                                each["metadata"]["name"], request.body)  # fmt: skip
            return 200, {"kind": "Status", "apiVersion": "v1", "status": "Success"}
        options = dict(request.body or {})
        if "gracePeriodSeconds" in request.query:
            options["gracePeriodSeconds"] = int(request.query["gracePeriodSeconds"])
        if request.dry:
            return 200, self.api.store.get(kind, request.namespace, name)
        return 200, self.api.delete(kind, request.namespace, name, options)

    def authorize(self, request: Request, authorization: str) -> str:
        """Authenticate and authorize a request; return the user's name. Raises Refused."""
        user = self.accounts.user(authorization)
        self.accounts.check(
            Call(
                user, request.verb, request.kind.group, request.resource,
                request.namespace, request.single,
            )
        )  # fmt: skip
        if request.kind in (ROLE, ROLE_BINDING) and request.verb in ("create", "update", "patch"):
            self.accounts.check_granted_rules(user, request.namespace, request.body)
        return user


def write_kubeconfig(folder: Path, url: str) -> None:
    authority = Path(__file__).parent / "certificates" / "ca.crt"
    (folder / "ca.crt").write_bytes(authority.read_bytes())
    cluster = {
        "server": url,
        "certificate-authority": str(folder / "ca.crt"),
        "tls-server-name": "localhost",
    }
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "test",
        "contexts": [
            {"name": "test",
             "context": {"cluster": "test", "user": "admin", "namespace": "default"}}
        ],
        "clusters": [{"name": "test", "cluster": cluster}],
        "users": [{"name": "admin", "user": {"token": "admin"}}],
    }  # fmt: skip
    path = folder / "kubeconfig"
    path.touch(mode=0o600)
    path.write_text(yaml.safe_dump(config), encoding="utf-8")


class _SelfClosingSocket(ssl.SSLSocket):
    """Closes itself if nothing refers to it any more. The ssl module of Python 3.11.7 drops a
    socket unclosed if its client has disconnected before the TLS handshake."""

    def __del__(self) -> None:
        self.close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128
    context: ssl.SSLContext

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self.connections = set[socket.socket]()
        super().__init__(address, handler)

    def end_connections(self) -> None:
        """Shut down the connections that clients keep open, so that the threads of these
        connections end."""
        for connection in list(self.connections):
            with suppress(OSError):  # the client disconnected
                socket.socket.shutdown(connection, socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that disconnect."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # buffer each response, so that it is sent as one packet
    timeout = IDLE_SECONDS
    disable_nagle_algorithm = True
    kube: KubeServer

    @property
    def _server(self) -> _Server:
        assert isinstance(self.server, _Server)
        return self.server

    def setup(self) -> None:
        self.request.settimeout(IDLE_SECONDS)
        plain = self.request
        try:
            self.request = self._server.context.wrap_socket(plain, server_side=True)
        except OSError:
            plain.close()
            raise
        self._server.connections.add(self.request)
        try:
            super().setup()
        except OSError:  # the client has disconnected, and finish() will not be called
            self._server.connections.discard(self.request)
            self.request.close()
            raise

    def finish(self) -> None:
        """Close the TLS socket, since the server closes only the TCP socket below it."""
        try:
            super().finish()
        finally:
            self._server.connections.discard(self.request)
            self.request.close()

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""

    def _handle(self) -> None:
        body = self._body()
        try:
            self._answer(body)
        except Refused as refused:
            self._send(refused.code, json.dumps(refused.as_status()).encode())
        except OSError:
            self.close_connection = True  # the client disconnected
        except Exception:  # a bug: reported to the client, and again when the server stops
            self.kube.failures.append(f"{self.command} {self.path}\n{traceback.format_exc()}")
            internal = Refused(500, "InternalError", self.kube.failures[-1])
            self._send(500, json.dumps(internal.as_status()).encode())

    def _body(self) -> bytes:
        length = int(self.headers.get("Content-Length") or 0)
        if length > LONGEST_BODY:
            self.close_connection = True
            return b""
        return self.rfile.read(length) if length else b""

    def _answer(self, body: bytes) -> None:
        parts = urlsplit(self.path)
        path = unquote(parts.path)
        self.kube.paths.append((self.command, self.path))
        if path in ("/healthz", "/livez", "/readyz"):
            self._send(200, b"ok", "text/plain")
            return
        if self.command == "GET" and self._discovery(path):
            return
        query = dict(parse_qsl(parts.query, keep_blank_values=True))
        request = parse_request(
            self.command, path, query, self.kube.api.kinds, _loaded(body),
            (self.headers.get("Content-Type") or "").partition(";")[0],
            self.headers.get("User-Agent") or "",
        )  # fmt: skip
        user = self.kube.authorize(request, self.headers.get("Authorization") or "")
        self.kube.on_request(request)
        if request.verb == "watch":
            self._watch(request)
        elif request.subresource == "log":
            self._log(request)
        elif request.subresource == "exec":
            self._exec(
                request, [value for name, value in parse_qsl(parts.query) if name == "command"]
            )
        else:
            code, found = self.kube.answer(request, user)
            if request.verb in ("get", "list") and self._wants_table:
                found = self._table(request, found)
            self._send(code, json.dumps(found).encode())

    def _discovery(self, path: str) -> bool:
        if path == "/openapi/v2" and PROTOBUF in (self.headers.get("Accept") or ""):
            self._send(
                200, b"", PROTOBUF.replace("@", ".")
            )  # an empty document, so that the client does not validate objects
            return True
        answer = discovery.answer(path, self.kube.api.kinds)
        if answer is not None:
            self._send(200, json.dumps(answer).encode())
        return answer is not None

    def _watch(self, request: Request) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.wfile.flush()
        for event in watch(self.kube.api, request, self.kube.closed.is_set):
            if self._wants_table and event["type"] in CHANGES:
                event["object"] = self._table(request, event["object"])
            line = json.dumps(event).encode() + b"\n"
            self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))
            self.wfile.flush()
        self.wfile.write(b"0\r\n\r\n")
        self.close_connection = True

    @property
    def _wants_table(self) -> bool:
        return tables.wants_table(self.headers.get("Accept") or "")

    def _table(self, request: Request, found: Object) -> Object:
        """Return one object or a list of objects as a table."""
        version = found["metadata"].get("resourceVersion", "")
        if request.subresource:
            return found
        items = found.get("items", [found])
        return tables.table(request.kind, items, version, self.kube.api.timestamp())

    def _log(self, request: Request) -> None:
        self.kube.api.store.get(request.kind, request.namespace, request.name)
        container = request.query.get("container", "")
        log = self._containers.log(request.namespace, request.name, container)
        self._send(200, log.encode(), "text/plain")

    def _exec(self, request: Request, command: list[str]) -> None:
        if (self.headers.get("Upgrade") or "").lower() != "websocket":
            raise bad_request("exec is served over WebSockets only")
        container = request.query.get("container", "")
        words, environment = self._containers.exec_command(
            request.namespace, request.name, container, command
        )
        key = self.headers.get("Sec-WebSocket-Key") or ""
        self.send_response(101)
        for name, value in accepted(key, self.headers.get("Sec-WebSocket-Protocol") or "").items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.flush()
        self.close_connection = True
        takes_input = request.query.get("stdin") in ("true", "1")
        execute(Channels(self.rfile, self.wfile), words, environment, takes_input)

    @property
    def _containers(self) -> Containers:
        assert self.kube.containers is not None, "this cluster has no kubelet"
        return self.kube.containers

    def _send(self, code: int, text: bytes, content_type: str = "application/json") -> None:
        self.send_response(code)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)
        self.wfile.flush()

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _handle


def _loaded(body: bytes) -> Any:
    """Decode a body: protobuf, JSON or YAML. Raises Refused (415) for an unknown protobuf kind."""
    if not body:
        return None
    if body.startswith(protobuf.MAGIC):
        return protobuf.decode_object(body)
    try:
        return json.loads(body)
    except ValueError:
        return yaml.safe_load(body)
