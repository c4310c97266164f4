"""The router's picture of the cluster, refreshed from the registry."""

from collections.abc import Sequence
from typing import Protocol

import structlog

from baton.clock import Clock
from baton.core.block_key import KeyRoot
from baton.core.member import Member
from baton.core.states import Role, WorkerState
from baton.errors import BatonError
from router.key_chain import KeyChain

log = structlog.get_logger(__name__)

REFRESH_SECONDS = 0.5

WORKER_ROLES = (Role.PREFILL, Role.DECODE)


class Members(Protocol):
    """The part of a registry that the router reads."""

    async def members(self) -> list[Member]: ...


class Cluster:
    """The members as of the last refresh. While the registry is away, the last ones known."""

    def __init__(self, registry: Members, clock: Clock, max_model_tokens: int) -> None:
        self._registry = registry
        self._clock = clock
        self._max_model_tokens = max_model_tokens
        self._members: tuple[Member, ...] = ()

    async def run(self) -> None:
        """Refreshes until cancelled."""
        while True:
            await self.refresh()
            await self._clock.sleep(REFRESH_SECONDS)

    async def refresh(self) -> None:
        try:
            found = await self._registry.members()
        except BatonError as error:
            log.warning("registry_unreachable", error=str(error))
            return
        self._members = tuple(sorted(found, key=lambda member: member.id))

    @property
    def members(self) -> Sequence[Member]:
        return self._members

    def ready(self, role: Role) -> list[Member]:
        """In the order of their ids."""
        return [
            member
            for member in self._members
            if member.role is role and member.state is WorkerState.READY
        ]

    @property
    def is_ready(self) -> bool:
        """Whether anything can be answered."""
        return bool(self.ready(Role.DECODE))

    @property
    def max_model_tokens(self) -> int:
        """Prompt and answer together: what the model takes and every ready worker does."""
        limits = [worker.max_model_tokens for worker in self._workers()]
        return min([self._max_model_tokens, *(limit for limit in limits if limit)])

    def key_chain(self, tenant_salt: bytes) -> KeyChain | None:
        """How the workers name blocks; None while there are none to say so."""
        for worker in self._workers():
            if worker.block_tokens:
                root = KeyRoot(
                    bytes.fromhex(worker.model_digest),
                    worker.kv_dtype,
                    worker.block_tokens,
                    tenant_salt=tenant_salt,
                )
                return KeyChain(root.key(), worker.block_tokens)
        return None

    def _workers(self) -> list[Member]:
        return [worker for role in WORKER_ROLES for worker in self.ready(role)]
