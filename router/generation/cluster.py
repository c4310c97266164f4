"""The router's picture of the cluster, refreshed from the registry."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from baton.clock import Clock
from baton.core.block_key import KeyRoot
from baton.core.member import Member
from baton.core.states import Role
from baton.registry.membership import Membership, MemberSource
from router.generation.block_key_hasher import BlockKeyHasher

WORKER_ROLES = (Role.PREFILL, Role.DECODE)

MAX_CACHED_HASHERS = 1024
"""Roots of tenants' chains that are remembered, some hundred bytes each."""


class Cluster:
    """The members as of the last refresh, as far as the registry is believed."""

    def __init__(self, registry: MemberSource, clock: Clock, max_model_tokens: int) -> None:
        self._membership = Membership(registry, clock)
        self._max_model_tokens = max_model_tokens
        self._known: _CommonCapabilities | None = None

    async def run(self) -> None:
        """Refreshes until cancelled."""
        await self._membership.run()

    async def refresh(self) -> None:
        await self._membership.refresh()

    @property
    def members(self) -> Sequence[Member]:
        """In the order of their ids."""
        return self._membership.members

    def ready(self, role: Role) -> Sequence[Member]:
        """In the order of their ids."""
        return self._membership.ready(role)

    @property
    def num_routers(self) -> int:
        """That take requests, this one among them once it is announced."""
        return len(self.ready(Role.ROUTER))

    @property
    def is_ready(self) -> bool:
        """Whether anything can be answered."""
        return bool(self.ready(Role.DECODE))

    @property
    def max_model_tokens(self) -> int:
        """Prompt and answer together: what the model takes and every ready worker does."""
        return self._agreed().max_model_tokens

    @property
    def any_worker(self) -> Member | None:
        """They all serve one model."""
        return self._agreed().worker

    def key_chain(self, tenant_salt: bytes) -> BlockKeyHasher | None:
        """How the workers name blocks; None while there are none to say so."""
        worker = self._agreed().worker
        if worker is None:
            return None
        return _chain(worker.model_digest, worker.kv_dtype, worker.block_tokens, tenant_salt)

    def _agreed(self) -> "_CommonCapabilities":
        """As of the last refresh: it is asked several times for each request."""
        members = self._membership.members
        if self._known is None or self._known.members is not members:
            workers = [worker for role in WORKER_ROLES for worker in self.ready(role)]
            limits = [worker.max_model_tokens for worker in workers if worker.max_model_tokens]
            named = next((worker for worker in workers if worker.block_tokens), None)
            self._known = _CommonCapabilities(
                members, min([self._max_model_tokens, *limits]), named
            )
        return self._known


@dataclass(frozen=True, slots=True)
class _CommonCapabilities:
    """What the ready ones of ``members`` have in common; ``worker`` says how blocks are named."""

    members: Sequence[Member]
    max_model_tokens: int
    worker: Member | None


@lru_cache(MAX_CACHED_HASHERS)
def _chain(digest: str, kv_dtype: str, block_tokens: int, salt: bytes) -> BlockKeyHasher:
    root = KeyRoot(bytes.fromhex(digest), kv_dtype, block_tokens, tenant_salt=salt)
    return BlockKeyHasher(root.key(), block_tokens)
