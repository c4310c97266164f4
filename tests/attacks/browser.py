"""A web page in a browser on the cluster's machine sends requests to the router, without a key."""

from tests.attacks.target import AttackTarget

FINDING = "4: pages of foreign origins can send POSTs, and read answers by DNS rebinding"

REQUESTS = (
    ("GET", "/v1/files"),
    ("GET", "/admin/pools"),
    ("GET", "/admin/usage"),
    ("POST", "/v1/files"),
    ("POST", "/v1/completions"),
    ("POST", "/tokenize"),
)
PAGES = ("Origin: https://evil.example\r\nHost: {host}\r\n", "Host: evil.example:{port}\r\n")


async def attack(target: AttackTarget) -> None:
    """Send every kind of request that a web page of another origin could send."""
    host, port = target.address
    body = b'{"prompt": "Hello", "max_tokens": 1}'
    while await target.wait_for_rate_limit():
        for page in PAGES:
            for method, path in REQUESTS:
                headers = page.format(host=f"{host}:{port}", port=port)
                sent = body if method == "POST" else b""
                request = f"{method} {path} HTTP/1.1\r\n{headers}Content-Type: text/plain\r\n"
                request += f"Content-Length: {len(sent)}\r\nConnection: close\r\n\r\n"
                answer = await target.send(request.encode() + sent)
                if answer.startswith(b"HTTP/1.1 2"):
                    target.record_violation(f"{method} {path} was answered")
