"""The table of all sockets that a cluster listens on, and the programs' announcements of those
sockets.

A program announces each socket on which it listens under a name from ``LISTENERS``.
``baton doctor --sockets`` compares the announcements with the kernel's list, and docs/network.md's
table is generated from ``LISTENERS``.
"""

from collections.abc import Callable
from dataclasses import dataclass

from baton.core.credentials import ClusterCredentials

NO_AUTHENTICATION = "none"
LOOPBACK_ONLY = "none, on loopback only"
MEMBER_AUTHENTICATIONS = (
    LOOPBACK_ONLY,
    "the cluster secret",
    "mutual TLS",
    "mutual TLS and the cluster secret",
)
HTTP_AUTHENTICATIONS = ("API keys", "API keys, over TLS", NO_AUTHENTICATION, "none, over TLS")
FILE_PERMISSIONS = "the file system: only the cluster's user may connect"


@dataclass(frozen=True, slots=True)
class ListenerSpec:
    """One kind of listening socket. ``address`` says where it is bound, in terms of Baton's
    settings. ``authentications`` lists the possible kinds of authentication; each open socket uses
    exactly one of them."""

    name: str
    process: str
    address: str
    protocol: str
    intended_clients: str
    authentications: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class OpenListener:
    """One open listening socket. ``address`` is host:port, or a path."""

    name: str
    address: str
    authentication: str


LISTENERS = {
    each.name: each
    for each in (
        ListenerSpec("http", "router", "`host`:`port`; if several routers share that "
                 "port, also `host`:any", "HTTP/1.1, the API", "clients", HTTP_AUTHENTICATIONS),
        ListenerSpec("grpc", "prefill, decode, mixed, kvstore, conductor, mock",
                 "`grpc_host`:`grpc_port`", "gRPC", "members", MEMBER_AUTHENTICATIONS),
        ListenerSpec("framed", "prefill, decode, mixed, conductor, mock",
                 "`grpc_host`:`framed_port`", "frames over TCP", "routers",
                 MEMBER_AUTHENTICATIONS),
        ListenerSpec("kv", "prefill, decode, mixed, kvstore", "`grpc_host`:any", "gRPC, KV blocks",
                 "workers and stores", MEMBER_AUTHENTICATIONS),
        ListenerSpec("ucx", "prefill, decode, mixed, kvstore",
                 "`nixl_interfaces`:any; none by default", "UCX", "workers and stores; but "
                 "any client that reaches it may read and write the process's memory",
                 (NO_AUTHENTICATION,)),
        ListenerSpec("ucx_wakeup", "prefill, decode, mixed, kvstore",
                 "abstract Unix datagram socket",
                 "a wake-up, whose content is not read", "processes of the host",
                 (NO_AUTHENTICATION,)),
        ListenerSpec("ops", "each except Redis", "`ops_host`:`ops_port`",
                 "HTTP/1.1, probes and metrics",
                 "probes, Prometheus", (NO_AUTHENTICATION,)),
        ListenerSpec("local_rpc", "kvstore", "a Unix socket in `/tmp/baton-UID`",
                 "calls of the store",
                 "workers of the host", (FILE_PERMISSIONS,)),
        ListenerSpec("shared_memory", "prefill, decode, mixed, kvstore, except on Linux",
                 "a Unix socket in `/tmp/baton-UID`",
                 "one file descriptor, of the process's KV memory",
                 "workers and stores of the host", (FILE_PERMISSIONS,)),
        ListenerSpec("control", "supervisor", "`BATON_HOME`/clusters/NAME/control.sock",
                 "lines of JSON", "`baton scale`, `baton drain`, routers",
                 (FILE_PERMISSIONS,)),
        ListenerSpec("redis", "redis", "127.0.0.1:any; `redis_url`", "RESP", "members",
                 ("a password",)),
        ListenerSpec("vllm", "the server of a worker with `engine=vllm`", "127.0.0.1:any",
                 "HTTP/1.1, NIXL and gloo, opened by vLLM", "its worker, and the other servers",
                 (LOOPBACK_ONLY,)),
        ListenerSpec("vllm_local", "the server of a worker with `engine=vllm`",
                 "Unix sockets in a folder of the worker's own, `/tmp/baton-vllm-…`",
                 "ZeroMQ, opened by vLLM", "its worker, and the server's own processes",
                 (FILE_PERMISSIONS,)),
        ListenerSpec("ray", "Ray's programs, and the supervisor, under `--on ray`",
                 "127.0.0.1:any; a Ray of `ray_address`: its own", "Ray's gRPC and HTTP",
                 "Ray's programs; any client may run code", ("Ray's token", NO_AUTHENTICATION)),
        ListenerSpec("ray_metrics", "Ray's autoscaler, under `--on ray`", "127.0.0.1:44217, or any",
                 "HTTP/1.1", "readers of Ray's metrics, which contain nothing of Baton",
                 (NO_AUTHENTICATION,)),
        ListenerSpec("ray_local", "Ray's raylet, under `--on ray`", "Unix sockets in Ray's folder",
                 "Ray's own", "Ray's programs", (FILE_PERMISSIONS,)),
    )
}  # fmt: skip
"""All listening sockets, by name."""

_hook: Callable[[OpenListener], None] | None = None


def announce_listener(name: str, address: str, authentication: str) -> None:
    """Announce that this process listens at ``address``, to the hook that ``set_listener_hook`` has
    set."""
    assert authentication in LISTENERS[name].authentications, (name, authentication)
    if _hook is not None:
        _hook(OpenListener(name, address, authentication))


def set_listener_hook(hook: Callable[[OpenListener], None] | None) -> None:
    """From now on, call ``hook`` whenever a listening socket is announced, in the thread that
    announces it. None removes the hook."""
    global _hook
    _hook = hook


def member_authentication(trust: ClusterCredentials) -> str:
    """Return how a member's socket authenticates its clients: one of MEMBER_AUTHENTICATIONS."""
    return MEMBER_AUTHENTICATIONS[2 * trust.has_tls + bool(trust.secret)]


def http_authentication(has_keys: bool, has_tls: bool) -> str:
    """Return how the router authenticates its clients: one of HTTP_AUTHENTICATIONS."""
    return HTTP_AUTHENTICATIONS[2 * (not has_keys) + has_tls]


def listener_table() -> str:
    """Return ``LISTENERS`` as a Markdown table, as it is in docs/network.md."""
    lines = [
        "| process | address | protocol | clients | authentication |",
        "|---|---|---|---|---|",
    ]
    for each in LISTENERS.values():
        authentications = "; or ".join(each.authentications)
        cells = (each.process, each.address, each.protocol, each.intended_clients, authentications)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
