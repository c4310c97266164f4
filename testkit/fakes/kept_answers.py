"""An in-memory store of kept answers."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from baton.clock import Clock
from router.serving.kept_answers import (
    KEPT_SECONDS,
    TOKEN_BYTES,
    AnswerKey,
    AnswerOrigin,
    BodyDiffers,
    Connection,
    KeptAnswer,
    KeptTokens,
)
from router.tenants.request_usage import RequestUsage


@dataclass(slots=True)
class KeptEntry:
    digest: bytes
    origin: AnswerOrigin
    expires_at: float
    num_connections: int = 0
    choices: dict[int, KeptTokens] = field(default_factory=dict)
    charges: dict[Connection, RequestUsage] = field(default_factory=dict)

    @property
    def newest(self) -> Connection:
        return Connection(self.origin.id, self.num_connections)

    def charged(self, connection: Connection | None = None) -> RequestUsage:
        """Return what was charged, without what was charged for ``connection``."""
        charged = RequestUsage()
        for each, usage in self.charges.items():
            charged = charged if each == connection else charged + usage.beyond(charged)
        return charged


class MemoryKeptAnswers:
    """Implements :class:`router.serving.kept_answers.KeptAnswers`."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.entries: dict[AnswerKey, KeptEntry] = {}

    async def claim(
        self, key: AnswerKey, digest: bytes, origin: AnswerOrigin | None
    ) -> KeptAnswer | None:
        expires_at = self._clock.monotonic() + KEPT_SECONDS
        entry = self._find(key)
        if entry is None:
            if origin is None:
                return None
            entry = self.entries[key] = KeptEntry(digest, origin, expires_at)
        elif entry.digest != digest:
            raise BodyDiffers
        entry.num_connections += 1
        entry.expires_at = expires_at
        return KeptAnswer(entry.origin, entry.newest, dict(entry.choices), entry.charged())

    async def keep(
        self, key: AnswerKey, connection: Connection, choices: Mapping[int, KeptTokens]
    ) -> bool:
        entry = self._find(key)
        if entry is None or entry.newest != connection:
            return entry is None
        for index, tokens in choices.items():
            known = entry.choices[index].data if index in entry.choices else b""
            data = known[: tokens.start * TOKEN_BYTES] + tokens.data
            entry.choices[index] = replace(tokens, data=data, start=0)
        entry.expires_at = self._clock.monotonic() + KEPT_SECONDS
        return True

    async def charge(
        self, key: AnswerKey, connection: Connection, usage: RequestUsage
    ) -> RequestUsage | None:
        entry = self._find(key)
        if entry is None or entry.origin.id != connection.answer_id:
            return None
        entry.charges[connection] = usage
        return entry.charged(connection)

    async def close(self) -> None:
        pass

    def _find(self, key: AnswerKey) -> KeptEntry | None:
        entry = self.entries.get(key)
        if entry is not None and entry.expires_at <= self._clock.monotonic():
            del self.entries[key]
            return None
        return entry
