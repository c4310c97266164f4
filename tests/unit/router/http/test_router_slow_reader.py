"""Tests that the request of a client that does not read its long answer is cancelled, and that
other clients are still served."""

import json
import socket
from dataclasses import replace

import httpx

from baton.core.states import Role
from baton.text.tokenizer import Tokenizer
from router.http.connection_limits import ConnectionLimits
from tests import router_harness
from tests.router_harness import COMPLETE, RouterHarness, eventually, member, serve_over_tcp

tokenizer = router_harness.tokenizer
LONG = 4000


def ask_and_not_read(url: str) -> socket.socket:
    body = {"prompt": "x", "max_tokens": LONG, "stream": True, "ignore_eos": True, "logprobs": 5}
    data = json.dumps(body).encode()
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", int(url.rpartition(":")[2])))
    head = b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n"
    client.sendall(head % (COMPLETE.encode(), len(data)) + data)
    return client


async def test_client_that_does_not_read_is_cancelled_and_others_are_served(
    tokenizer: Tokenizer,
) -> None:
    router = RouterHarness(tokenizer, "x" * LONG, automatic=True)
    router.members.list = [
        replace(member(name, role), max_model_tokens=2 * LONG)
        for name, role in (("p0", Role.PREFILL), ("d0", Role.DECODE))
    ]
    router.model.workers = router.service.cluster.workers_of("demo", 2 * LONG)
    refusals: list[str] = []
    limits = ConnectionLimits(write_timeout_seconds=0.3)
    async with serve_over_tcp(router, limits, refusals) as url, httpx.AsyncClient() as client:
        lazy = ask_and_not_read(url)
        await eventually(lambda: router.service.tenants.request_limiter.num_in_use == 1)
        for _ in range(3):
            other = await client.post(url + COMPLETE, json={"prompt": "y", "max_tokens": 5})
            assert other.json()["choices"][0]["text"] == "xxxxx"
        await eventually(lambda: refusals == ["unread"])
        await eventually(lambda: router.service.tenants.request_limiter.num_in_use == 0)
        explained = router.service.telemetry.history.explain("cmpl-0")
        assert explained is not None and explained["finish_reason"] == "cancelled"
        assert ("cmpl-0", 1) in router.decode.cancelled
        assert router.decode.jobs == router.prefill.jobs == []
        lazy.close()
