"""Requests with an ``Idempotency-Key``, whose answers any router can give again."""

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from struct import pack

from baton.clock import Clock
from baton.core.ids import TenantId
from baton.errors import Conflict, Unavailable
from router.errors import ApiError
from router.limits import MAX_KEPT_TOKENS, MAX_TENANT_KEPT_TOKENS
from router.serving.choice_stream import ChoiceStream
from router.serving.event_cursor import LAST_EVENT_ID, EventCursor, parse_event_id
from router.serving.kept_answers import (
    KEPT_SECONDS,
    AnswerKey,
    AnswerOrigin,
    BodyDiffers,
    KeptAnswer,
    KeptAnswers,
    KeptTokens,
)
from router.serving.request import GenerationRequest
from router.tenants.admission import RequestAdmission
from router.tenants.leaky_bucket import LeakyBucket
from router.tenants.request_usage import RequestUsage

IDEMPOTENCY_KEY = "Idempotency-Key"

ENTRY_TOKENS = 128
"""An answer counts as many besides its tokens, and each of its choices, too: 512 bytes, at least as
much as they take in Redis."""

KEEP_SECONDS = 1.0
"""How often the new tokens of all answers are kept. Those of a router that is killed in between are
generated again."""

_KEY = re.compile(r"[\x21-\x7e]{1,255}")
"""255 characters are Stripe's limit."""


@dataclass(frozen=True, slots=True)
class ResumeHeaders:
    """The headers of a request whose answer is to be kept. ``last_event_id`` is empty if its client
    has no event of the answer yet."""

    key: str
    last_event_id: str = ""

    @classmethod
    def parse(cls, key: str | None, last_event_id: str | None) -> "ResumeHeaders | None":
        """Return None for a request without a key. Raises ApiError (400)."""
        if key is None and not last_event_id:
            return None
        if key is None:
            raise ApiError(
                400,
                f"{LAST_EVENT_ID} continues the stream of an earlier request, and needs that "
                f"request's {IDEMPOTENCY_KEY}",
            )
        if not _KEY.fullmatch(key):
            raise ApiError(
                400, f"{IDEMPOTENCY_KEY} must have 1 to 255 printable ASCII characters, no spaces"
            )
        return cls(key, last_event_id or "")


class ResumableAnswer:
    """The answer to one request with a key, over one connection: the latest with that key, until
    :meth:`keep` has found a later one, and ended this one."""

    def __init__(
        self, resumption: "Resumption", key: AnswerKey, last_event_id: str, kept: KeptAnswer
    ) -> None:
        self.origin = kept.origin
        self._resumption = resumption
        self._key = key
        self._last_event_id = last_event_id
        self._connection = kept.connection
        self._kept = dict(kept.choices)
        self._charged = kept.charged
        self._choices: Sequence[ChoiceStream] = ()
        self._scope = asyncio.timeout(None)

    @property
    def request_id(self) -> str:
        """The id of the request at workers, where those of earlier connections may still run."""
        answer_id, number = self._connection
        return answer_id if number == 1 else f"{answer_id}-r{number}"

    def attach(
        self, choices: Sequence[ChoiceStream], request: GenerationRequest
    ) -> EventCursor | None:
        """Let the choices begin with the tokens that are kept of them, and keep theirs from now on.
        Answers with logprobs, which are not kept, are generated again. Returns the cursor of their
        events if the request is for a stream. Raises ApiError (400) if the client's last event
        can't be one of these."""
        is_ranked = request.num_candidates > request.num_choices  # by logprobs
        if not is_ranked and request.num_logprobs is request.num_prompt_logprobs is None:
            self._choices = choices
        for choice in self._choices:
            kept, resume = self._kept.get(choice.index), choice.generation.resume
            if kept and not resume(kept.token_ids, kept.finish_reason, kept.variant):
                del self._kept[choice.index]
        if not request.stream:
            return None
        for choice in choices:
            choice.splits_outputs = True
        if not self._last_event_id:
            return EventCursor(len(choices))
        return EventCursor(len(choices), parse_event_id(self._last_event_id, len(choices)))

    async def keep(self) -> None:
        """Renew the answer, and keep what is new of it. If a later connection has claimed it, end
        this one."""
        new, store = self._new_tokens(), self._resumption.store
        try:
            is_latest = await store.keep(self._key, self._connection, new)
        except Unavailable:
            return  # it is tried again a moment later, or the answer can't be continued
        self._kept |= new
        if not is_latest and self in self._resumption.connected and not self._scope.expired():
            self._scope.reschedule(asyncio.get_running_loop().time())

    @asynccontextmanager
    async def connected(self, admission: RequestAdmission) -> AsyncIterator[None]:
        """Generate the answer within this block. The tenant is charged once for all connections: at
        the end of each for what is new, whether or not a later one continues it. Raises Conflict in
        the block's place if a later connection claims the answer."""
        self._resumption.connected.add(self)
        try:
            async with self._scope:
                yield
        except TimeoutError as error:
            if not self._scope.expired():
                raise
            raise Conflict(
                f"another request with this {IDEMPOTENCY_KEY} has come, and gets the answer"
            ) from error
        finally:
            self._resumption.connected.discard(self)
            await self.keep()
            admission.set_charged(await self._charge(admission.usage))

    async def _charge(self, usage: RequestUsage) -> RequestUsage:
        """Have ``usage`` charged, and return what was charged for other connections, as far as that
        is known."""
        try:
            charged = await self._resumption.store.charge(self._key, self._connection, usage)
        except Unavailable:
            charged = None
        return self._charged if charged is None else charged

    def _new_tokens(self) -> dict[int, KeptTokens]:
        """Return the tokens that are not kept yet, of those choices that have some."""
        num_kept = sum(kept.end for kept in self._kept.values())
        new: dict[int, KeptTokens] = {}
        for choice in self._choices:
            generation, kept = choice.generation, self._kept.get(choice.index)
            start = 0 if kept is None else kept.end
            token_ids = generation.tokens[start:]
            has_ended = generation.finish_reason is not (kept and kept.finish_reason)
            if not (token_ids or has_ended):
                continue
            num_kept += len(token_ids)
            room = len(token_ids) + (ENTRY_TOKENS if kept is None else 0)
            may_keep = num_kept <= MAX_KEPT_TOKENS
            if may_keep and self._resumption.take_room(self._key.tenant, room):
                variant = choice.record.variant
                new[choice.index] = KeptTokens(
                    pack(f"<{len(token_ids)}I", *token_ids),
                    start,
                    generation.finish_reason,
                    "" if variant is None else variant.id,
                )
        return new


class Resumption:
    """Finds the answers of earlier requests with the same key, and, while :meth:`run` runs, keeps
    those of this router's requests. ``connected`` are those that are being generated."""

    def __init__(self, store: KeptAnswers, clock: Clock) -> None:
        self.store = store
        self.connected: set[ResumableAnswer] = set()
        self._clock = clock
        self._buckets: dict[TenantId, LeakyBucket] = {}
        """The tokens that were kept of each tenant's answers in the last minute."""

    async def run(self) -> None:
        """Keep new tokens until cancelled."""
        while True:
            await self._clock.sleep(KEEP_SECONDS)
            await self.keep_all()

    async def keep_all(self) -> None:
        """Keep the new tokens of all answers that are being generated."""
        async with asyncio.TaskGroup() as tasks:
            for answer in self.connected:
                tasks.create_task(answer.keep())
        now, limit = self._clock.monotonic(), MAX_TENANT_KEPT_TOKENS
        for tenant in [t for t, bucket in self._buckets.items() if not bucket.spent(limit, now)]:
            del self._buckets[tenant]

    def take_room(self, tenant: TenantId, num_tokens: int) -> bool:
        """Take room for this many of a tenant's tokens; return False if there is not enough."""
        bucket = self._buckets.setdefault(tenant, LeakyBucket())
        if bucket.remaining(MAX_TENANT_KEPT_TOKENS, self._clock.monotonic()) < num_tokens:
            return False
        bucket.spend(num_tokens)
        return True

    async def claim(
        self, tenant: TenantId, headers: ResumeHeaders, digest: bytes, origin: AnswerOrigin
    ) -> ResumableAnswer | None:
        """Return the answer to a request; a new one has this ``origin``. Returns None while Redis
        can't be reached, or while enough of the tenant's answers are kept: the answer is then given
        as if the request had no key. Raises ApiError if the answer to be continued is not kept any
        more (404), or if the key was used with another body (422, as the IETF's draft on
        Idempotency-Key has it)."""
        is_resumed = bool(headers.last_event_id)
        key = AnswerKey(tenant, headers.key)
        if not is_resumed and not self.take_room(tenant, ENTRY_TOKENS):
            return None
        try:
            kept = await self.store.claim(key, digest, None if is_resumed else origin)
        except BodyDiffers:
            raise ApiError(
                422,
                f"this {IDEMPOTENCY_KEY} was used for another request; send the same body to the "
                "same path, or use a new key",
                code="idempotency_key_reused",
            ) from None
        except Unavailable:
            if is_resumed:
                raise
            return None
        if kept is None:
            raise ApiError(
                404,
                f"no stream with this {IDEMPOTENCY_KEY} can be continued; streams are kept for "
                f"{KEPT_SECONDS:g} s after their routers' end",
                code="stream_not_found",
            )
        return ResumableAnswer(self, key, headers.last_event_id, kept)
