"""Requests that two HTTP parsers would read differently, and a chunk extension of a megabyte."""

from tests.attacks.target import AttackTarget

FINDING = "6: a body after Upgrade is a second request; several Hosts; long chunk extensions"

WORDS = ("websocket", "h2c", "anything")
SMUGGLED = "GET /smuggled HTTP/1.1\r\nHost: {host}\r\n\r\n"
EXTENSION_BYTES = 2**20


async def attack(target: AttackTarget) -> None:
    """Send each of the requests over a connection of its own."""
    host = target.url.partition("//")[2]
    while await target.wait_for_rate_limit():
        for word in WORDS:
            answer = await target.send(upgrade(host, word), wait_seconds=1.0)
            if answer.count(b"HTTP/1.1 ") > 1:
                target.record_violation(f"a body after Upgrade: {word} was answered as a request")
        for hosts in ("", f"Host: {host}\r\nHost: other.example\r\n"):
            request = f"GET /health HTTP/1.1\r\n{hosts}Connection: close\r\n\r\n"
            answer = await target.send(request.encode(), wait_seconds=1.0)
            if answer.startswith(b"HTTP/1.1 2"):
                target.record_violation(
                    f"a request with {hosts.count('Host')} Host headers was accepted"
                )
        await target.send(extended(host, target.attacker_key), wait_seconds=2.0)


def upgrade(host: str, word: str) -> bytes:
    """Return a request that asks to upgrade to the protocol ``word``. Its body is another
    request."""
    body = SMUGGLED.format(host=host)
    head = (
        f"POST /tokenize HTTP/1.1\r\nHost: {host}\r\nConnection: upgrade\r\nUpgrade: {word}\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return (head + body).encode()


def extended(host: str, key: str) -> bytes:
    """Return a request with a chunk whose extension is a megabyte."""
    head = (
        f"POST /tokenize HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {key}\r\n"
        "Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    return head.encode() + b"1;" + b"x" * EXTENSION_BYTES + b"\r\n{\r\n0\r\n\r\n"
