"""The router's picture of the cluster, refreshed from the registry."""

from collections.abc import Sequence

from baton.clock import Clock
from baton.core.block_key import KeyRoot
from baton.core.member import Member
from baton.core.states import Role
from baton.registry.membership import Membership, Registered
from router.key_chain import KeyChain

WORKER_ROLES = (Role.PREFILL, Role.DECODE)


class Cluster:
    """The members as of the last refresh, as far as the registry is believed."""

    def __init__(self, registry: Registered, clock: Clock, max_model_tokens: int) -> None:
        self._membership = Membership(registry, clock)
        self._max_model_tokens = max_model_tokens

    async def run(self) -> None:
        """Refreshes until cancelled."""
        await self._membership.run()

    async def refresh(self) -> None:
        await self._membership.refresh()

    @property
    def members(self) -> Sequence[Member]:
        """In the order of their ids."""
        return self._membership.members

    def ready(self, role: Role) -> list[Member]:
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
