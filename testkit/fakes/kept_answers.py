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
    KeptAnswer,
    KeptTokens,
)
from router.tenants.request_usage import RequestUsage


@dataclass(slots=True)
class KeptEntry:
    digest: bytes
    origin: AnswerOrigin
    expires_at: float
    connection: int = 0
    choices: dict[int, KeptTokens] = field(default_factory=dict)
    charged: RequestUsage = field(default_factory=RequestUsage)


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
        entry.connection += 1
        entry.expires_at = expires_at
        return KeptAnswer(entry.origin, entry.connection, dict(entry.choices), entry.charged)

    async def keep(
        self,
        key: AnswerKey,
        connection: int,
        choices: Mapping[int, KeptTokens],
        charged: RequestUsage | None = None,
    ) -> bool:
        entry = self._find(key)
        if entry is None or entry.connection != connection:
            return entry is None
        for index, tokens in choices.items():
            known = entry.choices[index].data if index in entry.choices else b""
            data = known[: tokens.start * TOKEN_BYTES] + tokens.data
            entry.choices[index] = replace(tokens, data=data, start=0)
        entry.charged = entry.charged if charged is None else charged
        entry.expires_at = self._clock.monotonic() + KEPT_SECONDS
        return True

    async def close(self) -> None:
        pass

    def _find(self, key: AnswerKey) -> KeptEntry | None:
        entry = self.entries.get(key)
        if entry is not None and entry.expires_at <= self._clock.monotonic():
            del self.entries[key]
            return None
        return entry
