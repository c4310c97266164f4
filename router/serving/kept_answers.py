"""What routers keep of the answers to requests with an ``Idempotency-Key``, so that any router can
give such an answer again."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from struct import iter_unpack
from typing import NamedTuple, Protocol

from baton.core.ids import TenantId, TokenId
from baton.core.request import FinishReason
from router.tenants.request_usage import RequestUsage

KEPT_SECONDS = 60.0
"""How long an answer is kept after its router has last renewed it: time for a client to notice
that its router is gone, and to try again a few times."""


class AnswerKey(NamedTuple):
    """A tenant, and the ``Idempotency-Key`` of one of its requests."""

    tenant: TenantId
    key: str


class Connection(NamedTuple):
    """A connection that has asked for an answer. ``number`` counts those of one answer, from 1. The
    answer's id tells it from an earlier answer under the same key, which the store has lost."""

    answer_id: str
    number: int


@dataclass(frozen=True, slots=True)
class AnswerOrigin:
    """What decides how a request is answered, besides its body: the response's id, the time of its
    creation in Unix seconds, and the seed of requests that have none."""

    id: str
    created: int
    seed: int


TOKEN_BYTES = 4
"""Tokens are kept as integers of this size, little-endian."""


@dataclass(frozen=True, slots=True)
class KeptTokens:
    """Tokens of one choice, from token ``start`` on. ``finish_reason`` is that of the worker that
    has ended the choice with them, or None. ``variant`` is the id of the variant of the model that
    has generated them, empty if it is not known."""

    data: bytes
    start: int = 0
    finish_reason: FinishReason | None = None
    variant: str = ""

    @property
    def token_ids(self) -> Sequence[TokenId]:
        return [TokenId(token_id) for (token_id,) in iter_unpack("<I", self.data)]

    @property
    def end(self) -> int:
        return self.start + len(self.data) // TOKEN_BYTES


@dataclass(frozen=True, slots=True)
class KeptAnswer:
    """An answer as its newest ``connection`` finds it. ``choices`` are the tokens of its choices so
    far, by index. ``charged`` is what its tenant was charged for earlier connections."""

    origin: AnswerOrigin
    connection: Connection
    choices: Mapping[int, KeptTokens] = field(default_factory=dict)
    charged: RequestUsage = field(default_factory=RequestUsage)


class BodyDiffers(Exception):
    """The key was used with another body."""


class KeptAnswers(Protocol):
    """Keeps answers for KEPT_SECONDS. Tenants don't see one another's answers. All methods raise
    Unavailable if the store can't be reached."""

    async def claim(
        self, key: AnswerKey, digest: bytes, origin: AnswerOrigin | None
    ) -> KeptAnswer | None:
        """Return the answer that is kept under this key, for a new connection. If there is none,
        keep one with this ``origin``, or return None if it is None. ``digest`` identifies the
        request's body. Raises BodyDiffers."""
        ...

    async def keep(
        self, key: AnswerKey, connection: Connection, choices: Mapping[int, KeptTokens]
    ) -> bool:
        """Renew an answer, and add tokens to its choices. Idempotent. Returns False, and does
        nothing, if a later connection has claimed the key. Does nothing if the answer has
        expired."""
        ...

    async def charge(
        self, key: AnswerKey, connection: Connection, usage: RequestUsage
    ) -> RequestUsage | None:
        """Charge the tenant for what is in ``usage``, that of a connection which ends, beyond what
        it was charged for the other connections. Return the latter, or None if the answer has
        expired. Idempotent."""
        ...

    async def close(self) -> None: ...
