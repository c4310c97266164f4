"""A member that knows the cluster secret, accepts requests, and sends invalid answers.

The answers can be recognised as invalid: nonexistent token ids, unknown finish reasons, missing
tokens, hundreds of logprobs, outputs for other requests. A member that sends wrong but valid tokens
is not covered, since wrong but valid tokens can't be detected.
"""

import re
from collections.abc import AsyncIterator
from dataclasses import replace
from itertools import cycle
from typing import Any

import grpc
import grpc.aio
import redis.asyncio

from baton.core.ids import Incarnation, WorkerId
from baton.core.member import Member
from baton.core.states import WORKER_ROLES, WorkerState
from baton.core.worker_load import WorkerLoad
from baton.errors import Invalid
from baton.registry.member_codec import member_from_json, member_to_json
from baton.registry.redis import RedisRegistry
from baton.rpc.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from tools.attacks.target import AttackTarget

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


class _MaliciousWorker(worker_pb2_grpc.WorkerServicer):
    """Answers each request with the next kind of invalid output, and sends no blocks."""

    def __init__(self, target: AttackTarget) -> None:
        self._target = target
        self._nonsense = cycle(NONSENSE)

    async def Run(
        self, requests: AsyncIterator[worker_pb2.RouterMessage], context: Any
    ) -> AsyncIterator[worker_pb2.WorkerMessage]:
        async for message in requests:
            if message.WhichOneof("message") != "submit":
                continue
            self._target.outcomes["requests that it got"] += 1
            spec = message.submit.spec
            output = Output()
            output.CopyFrom(next(self._nonsense))
            output.request_id, output.epoch = spec.request_id, spec.epoch
            foreign = Output(request_id="somebody else's", epoch=1, token_ids=[7])
            yield worker_pb2.WorkerMessage(outputs=[output, foreign])

    async def Pull(
        self, requests: AsyncIterator[worker_pb2.PullRequest], context: Any
    ) -> AsyncIterator[worker_pb2.PullEvent]:
        self._target.outcomes["readers that it got"] += 1
        yield worker_pb2.PullEvent(done=worker_pb2.PullDone(token_id=2**32 - 1))


async def attack(target: AttackTarget) -> None:
    """Register as the least loaded worker of each role."""
    server = grpc.aio.server()
    worker_pb2_grpc.add_WorkerServicer_to_server(_MaliciousWorker(target), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    store = redis.asyncio.Redis.from_url(target.redis_url)
    registry = RedisRegistry(target.redis_url, CLUSTER, target.cluster_secret)
    try:
        twins, is_sealed = await _twins(store, f"127.0.0.1:{port}")
        while not target.is_over:
            for twin in twins:
                await _announce(store, registry if is_sealed else None, twin)
            await target.sleep(1.0)
        for twin in twins:
            await registry.withdraw(twin.id, twin.generation)
    finally:
        await registry.close()
        await store.aclose()
        await server.stop(None)


async def _twins(store: Any, address: str) -> tuple[list[Member], bool]:
    """Return a copy of each worker's registry entry, and whether members sign their entries."""
    twins, is_sealed = [], False
    for key in await store.keys(f"baton:{CLUSTER}:member:*"):
        entry = await store.get(key) or b""
        match = re.match(rb"\{[^\n]*\}", entry)
        try:
            member = member_from_json(match[0] if match else b"")
        except Invalid:
            continue
        if member.role in WORKER_ROLES:
            is_sealed = is_sealed or b"\n" in entry
            twins.append(_twin(member, address))
    return twins, is_sealed


def _twin(member: Member, address: str) -> Member:
    load = WorkerLoad(num_blocks=member.load.num_blocks, free_blocks=member.load.num_blocks)
    return replace(
        member,
        id=WorkerId(f"evil-{member.id}"),
        address=address,
        framed_address="",
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
