"""Recognizes the environment variables that Kubernetes sets for a Service in a pod's namespace.

For a Service named ``baton-router`` they begin with ``BATON_ROUTER_``, like settings.
"""

import ipaddress
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType

_URL = re.compile(r"(tcp|udp|sctp)://(?P<host>[^/]+):(?P<port>[0-9]+)")


def _is_address(value: str) -> bool:
    try:
        ipaddress.ip_address(value)
    except ValueError:
        return False
    return True


def _is_port(value: str) -> bool:
    return value.isascii() and value.isdecimal() and 0 < int(value) < 65536


def _is_url(value: str) -> bool:
    match = _URL.fullmatch(value)
    if match is None or not _is_port(match["port"]):
        return False
    host = match["host"]
    return _is_address(host[1:-1] if host.startswith("[") and host.endswith("]") else host)


_SHAPES: Mapping[re.Pattern[str], Callable[[str], bool]] = MappingProxyType({
    re.compile(f"[A-Z][A-Z0-9_]*_{suffix}"): is_valid
    for suffix, is_valid in {
        "SERVICE_HOST": _is_address,
        "SERVICE_PORT(_[A-Z0-9_]+)?": _is_port,
        "PORT": _is_url,
        "PORT_[0-9]+_(TCP|UDP|SCTP)": _is_url,
        "PORT_[0-9]+_(TCP|UDP|SCTP)_PROTO": ("tcp", "udp", "sctp").__contains__,
        "PORT_[0-9]+_(TCP|UDP|SCTP)_PORT": _is_port,
        "PORT_[0-9]+_(TCP|UDP|SCTP)_ADDR": _is_address,
    }.items()
})  # fmt: skip


def is_service_variable(variable: str, value: str) -> bool:
    """Whether name and value of the variable are those of one that Kubernetes sets."""
    return any(name.fullmatch(variable) and is_valid(value) for name, is_valid in _SHAPES.items())
