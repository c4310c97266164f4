"""A chat of many turns, and the cached tokens that each prompt should have.

All full blocks of a prompt that were computed in the previous turn must be cached: the blocks of
that turn's prompt and answer, except for the answer's last token, whose KV was never computed. Each
turn ends by waiting until the store has these blocks."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from baton.clock import SystemClock
from baton.core.block_key import KeyRoot, block_keys
from baton.core.ids import TenantId
from baton.core.states import Role
from baton.core.store import LeaseRequest
from baton.core.tenant import tenant_salt
from baton.registry.redis import RedisRegistry
from baton.rpc.kvstore_client import KvStoreClient
from orchestrator.cluster_state import ClusterFolder
from testkit.local_cluster import LocalCluster

BLOCK_TOKENS = 16
ANSWER_TOKENS = 24
STORED_SECONDS = 20.0

EXACT: dict[str, object] = {"store_reload": "fetch", "store_timeout_seconds": 5.0}
"""Settings that make workers always fetch stored blocks. By default, a worker recomputes blocks if
it predicts that this is faster, so the cached tokens would depend on the machine's load."""


@dataclass(frozen=True)
class Turn:
    """One turn. ``token_ids`` is the answer. ``tiers`` has the number of cached prompt tokens by
    tier."""

    question: str
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    answer: str
    cached_tokens: int
    expected_tokens: int
    tiers: dict[str, int]


class ScriptedConversation:
    """A conversation with scripted questions. If another conversation is given as ``known``, its
    turns are repeated, so all their blocks are expected to be in the store already."""

    def __init__(self, cluster: LocalCluster, known: "ScriptedConversation | None" = None) -> None:
        self.turns: list[Turn] = []
        self._cluster = cluster
        self._known = known.turns if known is not None else []
        self._messages: list[dict[str, str]] = []
        self._computed: tuple[int, ...] = ()

    def take_turn(self) -> Turn:
        number = len(self.turns)
        words = " ".join(f"item{number}x{index}" for index in range(40))
        question = f"Turn {number}: what of {words}?"
        self._messages.append({"role": "user", "content": question})
        body = {
            "messages": self._messages, "max_tokens": ANSWER_TOKENS, "temperature": 0,
            "return_token_ids": True,
        }  # fmt: skip
        answer, headers = self._cluster.post_with_headers("/v1/chat/completions", body)
        choice = answer["choices"][0]
        prompt_ids = tuple(choice.get("prompt_token_ids") or answer["prompt_token_ids"])
        explained = self._cluster.get(f"/admin/requests/{headers['x-baton-request-id']}")
        turn = Turn(
            question,
            prompt_ids,
            tuple(choice["token_ids"]),
            choice["message"]["content"],
            answer["usage"]["prompt_tokens_details"]["cached_tokens"],
            full_blocks(shared(self._computed, prompt_ids), len(prompt_ids)),
            explained["cached_tokens_by_tier"],
        )
        self.turns.append(turn)
        self._messages.append({"role": "assistant", "content": turn.answer})
        self._computed = turn.prompt_ids + turn.token_ids[:-1]
        if not self._known:
            self._wait_until_stored()
        return turn

    def _wait_until_stored(self) -> None:
        asyncio.run(_until_stored(self._cluster, self._computed))


async def _until_stored(cluster: LocalCluster, token_ids: Sequence[int]) -> None:
    """Wait until the store has every full block of ``token_ids``."""
    state = ClusterFolder(cluster.home, "default").read_running()
    registry = RedisRegistry(state.redis_url, state.cluster, state.cluster_secret)
    members = await registry.members()
    await registry.close()
    worker = next(member for member in members if member.role is Role.DECODE)
    store = next(member for member in members if member.role is Role.KVSTORE)
    salt = tenant_salt(state.tenant_secret, TenantId("default"))
    digest = bytes.fromhex(worker.model_digest)
    root = KeyRoot(
        digest,
        worker.kv_dtype,
        worker.block_tokens,
        tenant_salt=salt,
        lossy_codec=worker.kv_codecs.lossy,
    )
    keys = tuple(block_keys(root.key(), token_ids, worker.block_tokens))
    client, clock = KvStoreClient(store.address, state.credentials), SystemClock()
    give_up_at = clock.monotonic() + STORED_SECONDS
    try:
        while (await client.lease(LeaseRequest(keys, 1.0, 0))).num_stored < len(keys):
            assert clock.monotonic() < give_up_at, f"not all {len(keys)} blocks were stored"
            await clock.sleep(0.02)
    finally:
        await client.close()


def shared(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the common prefix of ``one`` and ``other``."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def full_blocks(num_shared: int, num_prompt: int) -> int:
    """Return the expected number of cached tokens of a prompt: the tokens in full blocks that end
    before the prompt's last token, which is always computed."""
    return min(num_shared, num_prompt - 1) // BLOCK_TOKENS * BLOCK_TOKENS
