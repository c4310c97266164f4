"""Addresses as members tell them to each other: HOST:PORT."""


def host_port(host: str, port: int) -> str:
    """With brackets around an address of IPv6, whose colons would be taken for the port's."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
