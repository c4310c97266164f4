"""The router's view of the workers of one model."""

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from baton.core.kv_codec import KvCodecName
from baton.core.member import Member
from baton.core.server_api import SERVER_ROUTES
from baton.core.variant import Variant
from baton.core.worker_kinds import WORKER_KINDS, WorkerKind
from baton.registry.member_list import MemberList
from baton.registry.membership import MemberView

PROMPTS, ANSWERS, BOTH = (True, False), (False, True), (True, True)
"""Abilities of workers (:attr:`baton.core.worker_kinds.WorkerKind.abilities`)."""


class ModelWorkers:
    """The workers of ``model``. ``max_model_tokens`` is the length of the model's context."""

    def __init__(self, members: MemberView, model: str, max_model_tokens: int) -> None:
        self.model = model
        self._members = members
        self._context_tokens = max_model_tokens
        self._cached_capabilities: _Capabilities | None = None

    def ready_workers(
        self, can: Callable[[WorkerKind], bool], variant_id: str = ""
    ) -> Sequence[Member]:
        """Return the ready workers of the kinds of which ``can`` is true, sorted by kind and id:
        those of one variant, or of all if ``variant_id`` is empty. Workers that are incompatible
        with the others are left out (:class:`~baton.registry.member_list.MemberList`)."""
        return self._members.current.ready_workers(can, variant_id)

    @property
    def is_ready(self) -> bool:
        """Whether at least one worker that writes answers is ready."""
        return bool(self.ready_workers(lambda kind: kind.writes_answers))

    def expects_workers(self) -> bool:
        """Whether a worker that is not ready may soon be."""
        return bool(self._members.current.expected_workers)

    def known_workers(self) -> Sequence[Member]:
        """Return the ready workers; while there are none, those that may soon be."""
        current = self._members.current
        return current.ready_workers() or current.expected_workers

    @property
    def generates(self) -> bool:
        """Whether the known workers generate tokens; True while there are none."""
        return self._capabilities().generates

    @property
    def server_paths(self) -> frozenset[str]:
        """The paths that the servers of the known workers offer."""
        return self._capabilities().server_paths

    def paths(self, generating: Sequence[str]) -> Sequence[str]:
        """Return the paths under which the model can be used: those in ``generating`` if it
        generates tokens, and those of attached servers."""
        own = generating if self.generates else ()
        return sorted(self.server_paths.intersection(SERVER_ROUTES).union(own))

    @property
    def max_model_tokens(self) -> int:
        """The maximum number of tokens of prompt and answer together that the model and every known
        worker accept."""
        return self._capabilities().max_model_tokens

    @property
    def kv_codec(self) -> KvCodecName:
        """The strongest KV codec that a worker may apply; NONE while no worker is known."""
        return self._capabilities().kv_codec

    def rank_variants(self, key: str) -> Sequence[Variant]:
        """Return the variants that have known workers, in the order in which a request should try
        them. Equal keys give equal orders. Each variant is first for a share of the keys that is
        proportional to its capacity, and when that grows, it becomes first for further keys and
        stays so for the others (weighted rendezvous hashing)."""
        capacities = self._capabilities().by_variant
        if len(capacities) < 2:
            return tuple(capacities)
        return sorted(capacities, key=lambda each: _rank(key, each) / capacities[each])

    def _capabilities(self) -> "_Capabilities":
        """Return the capabilities as of the last refresh. They are cached, because each request
        reads them several times."""
        current = self._members.current
        if self._cached_capabilities is None or self._cached_capabilities.members is not current:
            workers = self.known_workers()
            limits = [worker.max_model_tokens for worker in workers if worker.max_model_tokens]
            codecs = {worker.kv_codecs.strongest for worker in workers}
            self._cached_capabilities = _Capabilities(
                current,
                min([self._context_tokens, *limits]),
                max(codecs, key=list(KvCodecName).index, default=KvCodecName.NONE),
                variant_capacities(workers),
                not workers or any(worker.server_api.generates for worker in workers),
                frozenset(path for worker in workers for path in worker.server_api.paths),
            )
        return self._cached_capabilities


@dataclass(frozen=True, slots=True)
class _Capabilities:
    """What the known workers among ``members`` can do: the context that all of them have, the
    strongest KV codec that any of them may apply, the capacity of each variant, whether any of them
    generates tokens (or there are none), and the paths that their servers offer."""

    members: MemberList
    max_model_tokens: int
    kv_codec: KvCodecName
    by_variant: Mapping[Variant, float]
    generates: bool
    server_paths: frozenset[str]


def variant_capacities(workers: Sequence[Member]) -> Mapping[Variant, float]:
    """Return how much of a model's traffic each variant can carry, in workers. A variant with
    prefill and decode workers is limited by the pool of which it has the smaller share, since the
    pools are sized for each other. A variant with one of these pools serves with it alone. Workers
    whose block size is not known are left out."""
    known = [worker for worker in workers if worker.block_tokens]
    totals = Counter(WORKER_KINDS[worker.role].abilities for worker in known)
    counts = Counter((worker.variant, WORKER_KINDS[worker.role].abilities) for worker in known)
    capacities: dict[Variant, float] = {}
    for variant in dict.fromkeys(worker.variant for worker in known):
        prefill, decode, alone = (counts[variant, can] for can in (PROMPTS, ANSWERS, BOTH))
        capacity: float = prefill + decode
        if prefill and decode:
            share = min(prefill / totals[PROMPTS], decode / totals[ANSWERS])
            capacity = share * (totals[PROMPTS] + totals[ANSWERS])
        capacities[variant] = capacity + alone
    return capacities


def _rank(key: str, variant: Variant) -> float:
    """Return a positive number, exponentially distributed over the keys."""
    digest = hashlib.blake2b(f"{variant.id}/{key}".encode(), digest_size=8).digest()
    return -math.log((int.from_bytes(digest, "big") + 1) / (2**64 + 1))
