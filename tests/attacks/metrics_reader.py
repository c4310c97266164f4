"""A client without a key tries to read metrics from the public port, and secrets from command
lines."""

import urllib.parse

import psutil

from tests.attacks.target import AttackTarget

FINDING = "5: metrics name tenants to clients without a key; a password is in a command line"

TELLTALES = (b"neighbour", b"baton_tenant_")


async def attack(target: AttackTarget) -> None:
    """Request metrics without a key, and inspect every process's command line."""
    password = urllib.parse.urlsplit(target.redis_url).password
    for member in target.members:
        arguments = " ".join(psutil.Process(member.pid).cmdline())
        if password and password in arguments:
            target.record_violation(f"{member.id} has Redis's password in its arguments")
    while await target.wait_for_rate_limit():
        answer = await target.send(
            f"GET /metrics HTTP/1.1\r\nHost: {target.url.partition('//')[2]}\r\n"
            "Connection: close\r\n\r\n".encode()
        )
        if any(telltale in answer for telltale in TELLTALES):
            target.record_violation("metrics name tenants to clients without a key")
        await target.sleep(1.0)
