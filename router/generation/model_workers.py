"""The router's view of the workers of one model."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from baton.core.adapter import AdapterRef
from baton.core.attention_window import AttentionWindow
from baton.core.block_key import KeyRoot
from baton.core.kv_codec import KvCodecName
from baton.core.member import Member
from baton.core.states import WORKER_ROLES, Role
from baton.registry.member_list import MemberList
from baton.registry.membership import MemberView
from router.generation.block_key_hasher import BlockKeyHasher

MAX_CACHED_HASHERS = 1024
"""The maximum number of block key hashers that are cached: one per model, adapter,
tenant salt and fidelity, some hundred bytes each."""


class ModelWorkers:
    """The workers of ``model``. ``max_model_tokens`` is the length of the model's context."""

    def __init__(self, members: MemberView, model: str, max_model_tokens: int) -> None:
        self.model = model
        self._members = members
        self._context_tokens = max_model_tokens
        self._cached_capabilities: _CommonCapabilities | None = None

    def ready_members(self, role: Role) -> Sequence[Member]:
        """Return the ready workers of a role, sorted by id. Workers that are incompatible with the
        others are left out (:class:`~baton.registry.member_list.MemberList`)."""
        return self._members.current.ready(role)

    @property
    def is_ready(self) -> bool:
        """Whether at least one decode or mixed worker is ready."""
        return bool(self.ready_members(Role.DECODE) or self.ready_members(Role.MIXED))

    @property
    def max_model_tokens(self) -> int:
        """The maximum number of tokens of prompt and answer together that the model and every ready
        worker accept."""
        return self._common_capabilities().max_model_tokens

    @property
    def any_worker(self) -> Member | None:
        """A ready worker whose block size and model digest are known; None if there is none."""
        return self._common_capabilities().worker

    @property
    def kv_codec(self) -> KvCodecName:
        """The strongest KV codec that the workers may apply; NONE while no worker is ready."""
        worker = self._common_capabilities().worker
        return KvCodecName.NONE if worker is None else worker.kv_codecs.strongest

    def block_key_hasher(
        self,
        tenant_salt: bytes,
        adapter: AdapterRef | None = None,
        attention_window: AttentionWindow | None = None,
        *,
        exact_kv: bool = False,
    ) -> BlockKeyHasher | None:
        """Return the hasher for a tenant's block keys, with an adapter or the base model, and with
        or without an attention window, which computes the same keys as the workers; None while
        :attr:`any_worker` is None. ``exact_kv``: for requests whose KV must not pass a lossy
        codec."""
        worker = self._common_capabilities().worker
        if worker is None:
            return None
        return _cached_hasher(
            worker.model_digest,
            worker.kv_dtype,
            worker.block_tokens,
            "" if adapter is None else adapter.digest.hex(),
            tenant_salt,
            "" if exact_kv else worker.kv_lossy_codec,
            "" if attention_window is None else attention_window.key_text,
        )

    def _common_capabilities(self) -> "_CommonCapabilities":
        """Return the common capabilities as of the last refresh. They are cached, because each
        request reads them several times."""
        current = self._members.current
        if self._cached_capabilities is None or self._cached_capabilities.members is not current:
            workers = [worker for role in WORKER_ROLES for worker in current.ready(role)]
            limits = [worker.max_model_tokens for worker in workers if worker.max_model_tokens]
            worker_with_blocks = next((worker for worker in workers if worker.block_tokens), None)
            self._cached_capabilities = _CommonCapabilities(
                current, min([self._context_tokens, *limits]), worker_with_blocks
            )
        return self._cached_capabilities


@dataclass(frozen=True, slots=True)
class _CommonCapabilities:
    """The capabilities that all ready workers among ``members`` have in common. ``worker`` is one
    of them whose block size and model digest are known, or None if there is none."""

    members: MemberList
    max_model_tokens: int
    worker: Member | None


@lru_cache(MAX_CACHED_HASHERS)
def _cached_hasher(
    digest: str,
    kv_dtype: str,
    block_tokens: int,
    adapter: str,
    salt: bytes,
    lossy_codec: str,
    attention_window: str,
) -> BlockKeyHasher:
    root = KeyRoot(
        bytes.fromhex(digest), kv_dtype, block_tokens, adapter, salt, lossy_codec, attention_window
    )
    return BlockKeyHasher(root.key(), block_tokens)
