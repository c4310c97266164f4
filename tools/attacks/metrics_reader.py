"""A stranger reads what tells of tenants: metrics on the public port, passwords in arguments."""

import urllib.parse

import psutil

from tools.attacks.target import AttackTarget

FINDING = "5: metrics tell of tenants without a key; a password stands in arguments"

TELLTALES = (b"neighbour", b"baton_tenant_")


async def attack(target: AttackTarget) -> None:
    """Asks without a key, and looks at the arguments of every program."""
    password = urllib.parse.urlsplit(target.redis_url).password
    for member in target.members:
        arguments = " ".join(psutil.Process(member.pid).cmdline())
        if password and password in arguments:
            target.harmed(f"{member.id} has Redis's password in its arguments")
    while await target.turn():
        answer = await target.send(
            f"GET /metrics HTTP/1.1\r\nHost: {target.url.partition('//')[2]}\r\n"
            "Connection: close\r\n\r\n".encode()
        )
        if any(telltale in answer for telltale in TELLTALES):
            target.harmed("metrics name tenants to whoever asks")
        await target.rest(1.0)
