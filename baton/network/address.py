"""Addresses in the form HOST:PORT, and the networks that clients come from."""

import ipaddress

V6_SITE_BITS = 64
"""Prefix length by which IPv6 addresses are grouped: a client can use any address of its /64."""


def host_port(host: str, port: int) -> str:
    """Format HOST:PORT, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def source_network(host: str) -> str:
    """Return the key by which connections are grouped: an IPv4 address, or an IPv6 /64 network."""
    if ":" not in host:
        return host
    try:
        network = ipaddress.ip_network((host.partition("%")[0], V6_SITE_BITS), strict=False)
    except ValueError:
        return host
    return str(network)
