"""Every socket that a cluster listens on: one table, and what each program says that it opened.

A program announces each listening socket under a name of ``LISTENERS``; ``baton doctor --sockets``
compares that with what the kernel knows, and docs/network.md's table is made from it.
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
    """One kind of listening socket. ``address`` says where it is bound, by Baton's settings;
    ``speakers`` who is meant to connect. ``authentications`` are all that it may have, one at a
    time."""

    name: str
    process: str
    address: str
    protocol: str
    speakers: str
    authentications: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class OpenListener:
    """One socket that is open. ``address`` is host:port, or a path."""

    name: str
    address: str
    authentication: str


LISTENERS = {
    each.name: each
    for each in (
        ListenerSpec("http", "router", "`host`:`port`; beside it, where several routers share the "
                 "port, `host`:any", "HTTP/1.1, the API", "clients", HTTP_AUTHENTICATIONS),
        ListenerSpec("grpc", "prefill, decode, kvstore, conductor, mock",
                 "`grpc_host`:`grpc_port`", "gRPC", "members", MEMBER_AUTHENTICATIONS),
        ListenerSpec("line", "prefill, decode, conductor, mock",
                 "`grpc_host`:`line_port`", "lines (frames over TCP)", "routers",
                 MEMBER_AUTHENTICATIONS),
        ListenerSpec("kv", "prefill, decode, kvstore", "`grpc_host`:any", "gRPC, KV blocks",
                 "workers and stores", MEMBER_AUTHENTICATIONS),
        ListenerSpec("ucx", "prefill, decode, kvstore",
                 "`nixl_interfaces`:any; none by default", "UCX", "workers and stores; in truth "
                 "whoever reaches it, and it may write any memory of the process",
                 (NO_AUTHENTICATION,)),
        ListenerSpec("ucx_wakeup", "prefill, decode, kvstore", "abstract Unix datagram socket",
                 "a wake-up, whose content is not read", "processes of the host",
                 (NO_AUTHENTICATION,)),
        ListenerSpec("ops", "each, but Redis", "`ops_host`:`ops_port`",
                 "HTTP/1.1, probes and metrics",
                 "probes, Prometheus; a drain only from the same host", (NO_AUTHENTICATION,)),
        ListenerSpec("local_rpc", "kvstore", "a Unix socket in `/tmp/baton-UID`",
                 "calls of the store",
                 "workers of the host", (FILE_PERMISSIONS,)),
        ListenerSpec("control", "supervisor", "`BATON_HOME`/clusters/NAME/control.sock",
                 "lines of JSON", "`baton scale`, `baton drain`, routers",
                 (FILE_PERMISSIONS,)),
        ListenerSpec("redis", "redis", "127.0.0.1:any; `redis_url`", "RESP", "members",
                 ("a password",)),
        ListenerSpec("ray", "Ray's programs, and the supervisor, under `--on ray`",
                 "127.0.0.1:any; a Ray of `ray_address`: its own", "Ray's gRPC and HTTP",
                 "Ray's programs: who may speak runs code", ("Ray's token", NO_AUTHENTICATION)),
        ListenerSpec("ray_metrics", "Ray's autoscaler, under `--on ray`", "127.0.0.1:44217, or any",
                 "HTTP/1.1", "whoever reads Ray's figures; nothing of Baton is in them",
                 (NO_AUTHENTICATION,)),
        ListenerSpec("ray_local", "Ray's raylet, under `--on ray`", "Unix sockets in Ray's folder",
                 "Ray's own", "Ray's programs", (FILE_PERMISSIONS,)),
    )
}  # fmt: skip
"""By their names."""

_hook: Callable[[OpenListener], None] | None = None


def announce_listener(name: str, address: str, authentication: str) -> None:
    """Say that this process listens at ``address``, to whoever has asked for it with
    ``set_listener_hook``."""
    assert authentication in LISTENERS[name].authentications, (name, authentication)
    if _hook is not None:
        _hook(OpenListener(name, address, authentication))


def set_listener_hook(hook: Callable[[OpenListener], None] | None) -> None:
    """Get every announcement from now on, from any thread; None: nobody gets them."""
    global _hook
    _hook = hook


def member_authentication(trust: ClusterCredentials) -> str:
    """How a member's socket authenticates who connects."""
    return MEMBER_AUTHENTICATIONS[2 * trust.has_tls + bool(trust.secret)]


def http_authentication(has_keys: bool, has_tls: bool) -> str:
    """How the router authenticates who asks."""
    return HTTP_AUTHENTICATIONS[2 * (not has_keys) + has_tls]


def listener_table() -> str:
    """The table of docs/network.md."""
    lines = [
        "| process | address | protocol | who may speak | authentication |",
        "|---|---|---|---|---|",
    ]
    for each in LISTENERS.values():
        locks = "; or ".join(each.authentications)
        cells = (each.process, each.address, each.protocol, each.speakers, locks)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
