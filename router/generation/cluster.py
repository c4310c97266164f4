"""The router's view of the cluster, refreshed from the registry."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from baton.clock import Clock
from baton.core.block_key import KeyRoot
from baton.core.ids import WorkerId
from baton.core.member import Member
from baton.core.states import WORKER_ROLES, Role
from baton.registry.membership import Membership, MemberSource
from router.generation.block_key_hasher import BlockKeyHasher

MAX_CACHED_HASHERS = 1024
"""The maximum number of block key hashers that are cached: one per tenant salt, some hundred bytes
each."""


class Cluster:
    """The members of the cluster as of the last refresh. During an outage of the registry, these
    are the last known members (see :class:`Membership`)."""

    def __init__(self, registry: MemberSource, clock: Clock, max_model_tokens: int) -> None:
        self._membership = Membership(registry, clock)
        self._max_model_tokens = max_model_tokens
        self._cached_capabilities: _CommonCapabilities | None = None

    async def run(self) -> None:
        """Keep refreshing the view of the cluster's members until cancelled."""
        await self._membership.run()

    async def refresh(self) -> None:
        await self._membership.refresh()

    @property
    def members(self) -> Sequence[Member]:
        """All members, sorted by id."""
        return self._membership.members

    @property
    def last_refreshed_at(self) -> float:
        """The monotonic time when the registry last answered; minus infinity if it never did."""
        return self._membership.last_answer_seconds

    @property
    def incompatible_ids(self) -> frozenset[WorkerId]:
        """The ids of workers that are not used, since their numerics differ from the others'."""
        return self._membership.incompatible_ids

    def ready_members(self, role: Role) -> Sequence[Member]:
        """Return the ready members of a role, sorted by id. Workers whose numerics are incompatible
        with those of the other workers are left out (:mod:`baton.core.numerics`)."""
        return self._membership.ready(role)

    @property
    def num_routers(self) -> int:
        """The number of ready routers, including this one once it has registered."""
        return len(self.ready_members(Role.ROUTER))

    @property
    def is_ready(self) -> bool:
        """Whether at least one decode worker is ready."""
        return bool(self.ready_members(Role.DECODE))

    @property
    def max_model_tokens(self) -> int:
        """The maximum number of tokens of prompt and answer together that the model and every ready
        worker accept."""
        return self._common_capabilities().max_model_tokens

    @property
    def any_worker(self) -> Member | None:
        """A ready worker whose block size and model digest are known; None if there is none. All
        workers serve the same model."""
        return self._common_capabilities().worker

    def block_key_hasher(self, tenant_salt: bytes) -> BlockKeyHasher | None:
        """Return the hasher for a tenant's block keys, which computes the same keys as the workers;
        None while :attr:`any_worker` is None."""
        worker = self._common_capabilities().worker
        if worker is None:
            return None
        return _cached_hasher(
            worker.model_digest, worker.kv_dtype, worker.block_tokens, tenant_salt
        )

    def _common_capabilities(self) -> "_CommonCapabilities":
        """Return the common capabilities as of the last refresh. They are cached, because each
        request reads them several times."""
        members = self._membership.members
        if self._cached_capabilities is None or self._cached_capabilities.members is not members:
            workers = [worker for role in WORKER_ROLES for worker in self.ready_members(role)]
            limits = [worker.max_model_tokens for worker in workers if worker.max_model_tokens]
            worker_with_blocks = next((worker for worker in workers if worker.block_tokens), None)
            self._cached_capabilities = _CommonCapabilities(
                members, min([self._max_model_tokens, *limits]), worker_with_blocks
            )
        return self._cached_capabilities


@dataclass(frozen=True, slots=True)
class _CommonCapabilities:
    """The capabilities that all ready workers among ``members`` have in common. ``worker`` is one
    of them whose block size and model digest are known, or None if there is none."""

    members: Sequence[Member]
    max_model_tokens: int
    worker: Member | None


@lru_cache(MAX_CACHED_HASHERS)
def _cached_hasher(digest: str, kv_dtype: str, block_tokens: int, salt: bytes) -> BlockKeyHasher:
    root = KeyRoot(bytes.fromhex(digest), kv_dtype, block_tokens, tenant_salt=salt)
    return BlockKeyHasher(root.key(), block_tokens)
