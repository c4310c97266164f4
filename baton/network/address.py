"""Addresses in the form HOST:PORT."""


def host_port(host: str, port: int) -> str:
    """Format HOST:PORT, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
