"""A member that knows the cluster secret, accepts requests, and sends invalid answers.

The answers can be recognised as invalid: nonexistent token ids, unknown finish reasons, missing
tokens, hundreds of logprobs, outputs for other requests. A member that sends wrong but valid tokens
is not covered, since wrong but valid tokens can't be detected.
"""

import re
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from itertools import cycle
from typing import Any

import grpc
import grpc.aio
import redis.asyncio

from baton.core.credentials import ClusterCredentials
from baton.core.ids import Incarnation, WorkerId
from baton.core.member import Member
from baton.core.states import WorkerState
from baton.core.worker_kinds import WORKER_KINDS
from baton.core.worker_load import WorkerLoad
from baton.errors import Invalid
from baton.registry.member_codec import member_from_json, member_to_json
from baton.registry.redis import RedisRegistry
from baton.rpc.framed.connection import FramedConnection
from baton.rpc.framed.server import FramedServer
from baton.rpc.server import add_service
from baton.rpc.service import WORKER
from baton.rpc.v1 import common_pb2, worker_pb2
from tests.attacks.target import AttackTarget

FINDING = "12, 13: a compromised member"

TTL_SECONDS = 3.0
CLUSTER = "default"

Output = common_pb2.RequestOutput
NONSENSE = (
    Output(token_ids=[2**32 - 1]),
    Output(token_ids=[4096]),
    Output(token_ids=[5], first_index=1000),
    Output(token_ids=[5], finish_reason=77),  # type: ignore[arg-type]
    Output(token_ids=list(range(4000))),
    Output(
        token_ids=[5], logprobs=[common_pb2.TokenLogprob(token_id=5, top_token_ids=range(4000))]
    ),
    Output(token_ids=[5], cached_tokens=2**32 - 1, details={"x" * 4000: "y" * 100_000}),
    Output(token_ids=[5], finish_reason=common_pb2.FINISH_REASON_STOP, first_index=2**32 - 1),
)


class _MaliciousWorker:
    """Answers each request with the next kind of invalid output, and sends no blocks."""

    def __init__(self, target: AttackTarget) -> None:
        self._target = target
        self._nonsense = cycle(NONSENSE)

    def answer(self, message: worker_pb2.RouterMessage) -> worker_pb2.WorkerMessage | None:
        if message.WhichOneof("message") != "submit":
            return None
        self._target.outcomes["requests that it got"] += 1
        spec = message.submit.spec
        output = Output()
        output.CopyFrom(next(self._nonsense))
        output.request_id, output.epoch = spec.request_id, spec.epoch
        foreign = Output(request_id="somebody else's", epoch=1, token_ids=[7])
        return worker_pb2.WorkerMessage(outputs=[output, foreign])

    async def pull(self, requests: AsyncIterator[worker_pb2.PullRequest], write: Any) -> None:
        self._target.outcomes["readers that it got"] += 1
        await write(worker_pb2.PullEvent(done=worker_pb2.PullDone(token_id=2**32 - 1)))


class _MaliciousStream:
    """The stream of one router."""

    def __init__(self, worker: _MaliciousWorker, connection: FramedConnection) -> None:
        self._worker = worker
        self._connection = connection

    def on_message(self, payload: bytes) -> None:
        answer = self._worker.answer(worker_pb2.RouterMessage.FromString(payload))
        if answer is not None:
            self._connection.send_message(answer.SerializeToString())

    def on_lost(self) -> None: ...


async def attack(target: AttackTarget) -> None:
    """Register as the least loaded worker of each role."""
    worker, trust = _MaliciousWorker(target), ClusterCredentials(target.cluster_secret)
    server = grpc.aio.server()
    add_service(server, WORKER, worker)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    framed_server = FramedServer(trust, {WORKER.name: partial(_MaliciousStream, worker)})
    framed_port = await framed_server.listen("127.0.0.1", 0)
    store = redis.asyncio.Redis.from_url(target.redis_url)
    registry = RedisRegistry(target.redis_url, CLUSTER, target.cluster_secret)
    try:
        twins, is_sealed = await _twins(store, f"127.0.0.1:{port}", f"127.0.0.1:{framed_port}")
        while not target.is_over:
            for twin in twins:
                await _announce(store, registry if is_sealed else None, twin)
            await target.sleep(1.0)
        for twin in twins:
            await registry.withdraw(twin.id, twin.generation)
    finally:
        await registry.close()
        await store.aclose()
        await framed_server.close()
        await server.stop(None)


async def _twins(store: Any, address: str, framed_address: str) -> tuple[list[Member], bool]:
    """Return a copy of each worker's registry entry, and whether members sign their entries."""
    twins, is_sealed = [], False
    for key in await store.keys(f"baton:{CLUSTER}:member:*"):
        entry = await store.get(key) or b""
        match = re.match(rb"\{[^\n]*\}", entry)
        try:
            member = member_from_json(match[0] if match else b"")
        except Invalid:
            continue
        if member.role in WORKER_KINDS:
            is_sealed = is_sealed or b"\n" in entry
            twins.append(_twin(member, address, framed_address))
    return twins, is_sealed


def _twin(member: Member, address: str, framed_address: str) -> Member:
    load = WorkerLoad(num_blocks=member.load.num_blocks, free_blocks=member.load.num_blocks)
    return replace(
        member,
        id=WorkerId(f"evil-{member.id}"),
        address=address,
        framed_address=framed_address,
        state=WorkerState.READY,
        generation=Incarnation(member.generation + 1),
        load=replace(load, at_seconds=member.load.at_seconds),
    )


async def _announce(store: Any, registry: RedisRegistry | None, twin: Member) -> None:
    if registry is not None:
        await registry.announce(twin, TTL_SECONDS)
        return
    await store.set(
        f"baton:{CLUSTER}:member:{twin.id}", member_to_json(twin), px=round(TTL_SECONDS * 1000)
    )
    await store.sadd(f"baton:{CLUSTER}:members", twin.id)
