"""Runs one test suite over the kept answers in Redis and over their in-memory implementation."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from redis.asyncio import Redis

from baton.clock import ManualClock
from baton.core.ids import TenantId
from baton.core.request import FinishReason
from baton.errors import Unavailable
from router.serving.kept_answers import (
    KEPT_SECONDS,
    AnswerKey,
    AnswerOrigin,
    BodyDiffers,
    Connection,
    KeptAnswers,
    KeptTokens,
)
from router.serving.redis_kept_answers import RedisKeptAnswers
from router.tenants.request_usage import RequestUsage
from testkit.fakes.kept_answers import MemoryKeptAnswers

KEY = AnswerKey(TenantId("a:b"), "k")
ORIGIN = AnswerOrigin("chatcmpl-1", 1_700_000_000, 2**63 - 1)
OTHER = AnswerOrigin("chatcmpl-2", 1_800_000_000, 5)
FIRST, SECOND, ANOTHER = Connection(ORIGIN.id, 1), Connection(ORIGIN.id, 2), Connection(OTHER.id, 1)
DIGEST, OTHER_DIGEST = bytes(range(32)), bytes(32)
REDIS_KEPT_SECONDS = 0.4


class Store:
    """A store, and a way to let a part of KEPT_SECONDS pass."""

    def __init__(self, url: str | None) -> None:
        self._clock = ManualClock()
        self.answers: KeptAnswers = (
            MemoryKeptAnswers(self._clock)
            if url is None
            else RedisKeptAnswers(url, "test", REDIS_KEPT_SECONDS)
        )

    async def elapse(self, part: float) -> None:
        if isinstance(self.answers, MemoryKeptAnswers):
            self._clock.advance(part * KEPT_SECONDS)
        else:
            await asyncio.sleep(part * REDIS_KEPT_SECONDS)


@pytest.fixture(params=["memory", "redis"])
async def store(request: pytest.FixtureRequest, valkey_url: str) -> AsyncIterator[Store]:
    async with Redis.from_url(valkey_url) as client:
        await client.flushdb()
    store = Store(None if request.param == "memory" else valkey_url)
    yield store
    await store.answers.close()


async def test_a_new_answer_keeps_its_origin(store: Store) -> None:
    answers = store.answers
    assert await answers.claim(KEY, DIGEST, None) is None
    for number, origin in enumerate((ORIGIN, OTHER, None), 1):
        kept = await answers.claim(KEY, DIGEST, origin)
        assert kept is not None
        assert (kept.origin, kept.connection) == (ORIGIN, Connection(ORIGIN.id, number))


async def test_another_body_is_refused(store: Store) -> None:
    answers = store.answers
    await answers.claim(KEY, DIGEST, ORIGIN)
    for origin in (OTHER, None):
        with pytest.raises(BodyDiffers):
            await answers.claim(KEY, OTHER_DIGEST, origin)
    kept = await answers.claim(KEY, DIGEST, None)
    assert kept is not None and kept.connection == SECOND


async def test_tenants_and_keys_are_apart(store: Store) -> None:
    answers = store.answers
    await answers.claim(KEY, DIGEST, ORIGIN)
    others = (AnswerKey(TenantId("a"), "b:k"), AnswerKey(TenantId("a"), "k"), KEY._replace(key="l"))
    for key in others:
        assert await answers.claim(key, DIGEST, None) is None
        kept = await answers.claim(key, OTHER_DIGEST, OTHER)
        assert kept is not None and (kept.origin, kept.connection) == (OTHER, ANOTHER)


async def test_an_answer_expires_unless_it_is_claimed(store: Store) -> None:
    answers = store.answers
    await answers.claim(KEY, DIGEST, ORIGIN)
    for _ in range(3):
        await store.elapse(0.6)
        assert await answers.claim(KEY, DIGEST, None) is not None
    await store.elapse(1.1)
    assert await answers.claim(KEY, DIGEST, None) is None
    kept = await answers.claim(KEY, OTHER_DIGEST, OTHER)
    assert kept is not None and kept.connection == ANOTHER


async def test_an_unreachable_or_damaged_store_is_unavailable(valkey_url: str) -> None:
    lost = RedisKeptAnswers("redis://127.0.0.1:1", "test")
    with pytest.raises(Unavailable):
        await lost.claim(KEY, DIGEST, ORIGIN)
    await lost.close()
    answers = RedisKeptAnswers(valkey_url, "test")
    async with Redis.from_url(valkey_url) as client:
        await client.flushdb()
        await answers.claim(KEY, DIGEST, ORIGIN)
        [name] = await client.keys("*")
        assert b"baton:test:answers:a%3Ab:" in name
        await client.hset(name, "seed", "x")
    with pytest.raises(Unavailable, match="invalid answer"):
        await answers.claim(KEY, DIGEST, None)
    await answers.close()


def tokens(*token_ids: int, start: int = 0, finish: FinishReason | None = None) -> KeptTokens:
    return KeptTokens(b"".join(each.to_bytes(4, "little") for each in token_ids), start, finish)


async def test_tokens_are_added_to_the_latest_connections_answer(store: Store) -> None:
    answers, vocabulary = store.answers, 2**31 - 1
    await answers.claim(KEY, DIGEST, ORIGIN)
    assert await answers.keep(KEY, FIRST, {0: tokens(1, 2), 1: replace(tokens(10), variant="v")})
    for _ in range(2):  # a repeated call changes nothing
        assert await answers.keep(KEY, FIRST, {0: tokens(3, vocabulary, start=2)})
    ended = tokens(10, 11, finish=FinishReason.STOP)
    assert await answers.keep(KEY, FIRST, {1: ended})
    assert await answers.keep(KEY, FIRST, {})
    kept = await answers.claim(KEY, DIGEST, None)
    assert kept is not None
    assert kept.choices == {0: tokens(1, 2, 3, vocabulary), 1: ended}
    assert (kept.choices[0].token_ids, kept.choices[0].end) == ([1, 2, 3, vocabulary], 4)
    assert not await answers.keep(KEY, FIRST, {0: tokens(7)})
    third = kept.connection._replace(number=3)
    assert await answers.claim(KEY, DIGEST, None) == replace(kept, connection=third)


async def test_a_connection_does_not_change_an_answer_that_was_lost_and_begun_anew(
    store: Store,
) -> None:
    answers = store.answers
    await answers.claim(KEY, DIGEST, ORIGIN)
    await store.elapse(1.1)
    await answers.claim(KEY, DIGEST, OTHER)
    assert await answers.keep(KEY, ANOTHER, {0: tokens(1)})
    assert not await answers.keep(KEY, FIRST, {0: tokens(7, 8, start=1)})
    assert await answers.charge(KEY, FIRST, RequestUsage(1, 5, 0, 3)) is None
    kept = await answers.claim(KEY, DIGEST, None)
    assert kept is not None
    assert (kept.choices, kept.charged) == ({0: tokens(1)}, RequestUsage())


async def test_a_connection_is_charged_for_what_others_were_not(store: Store) -> None:
    answers, whole = store.answers, RequestUsage(1, 5, 4, 9)
    for _ in range(3):
        await answers.claim(KEY, DIGEST, ORIGIN)
    for _ in range(2):  # a repeated call changes nothing
        assert await answers.charge(KEY, SECOND, whole) == RequestUsage()
    for _ in range(2):
        assert await answers.charge(KEY, FIRST, RequestUsage(1, 5, 4, 3)) == whole
    longer = RequestUsage(1, 5, 4, 12)
    assert await answers.charge(KEY, Connection(ORIGIN.id, 3), longer) == whole
    kept = await answers.claim(KEY, DIGEST, None)
    assert kept is not None and kept.charged == longer
    await store.elapse(1.1)
    assert await answers.charge(KEY, FIRST, whole) is None


async def test_keeping_renews_an_answer_and_creates_none(store: Store) -> None:
    answers = store.answers
    await answers.claim(KEY, DIGEST, ORIGIN)
    for _ in range(3):
        await store.elapse(0.6)
        assert await answers.keep(KEY, FIRST, {})
    await store.elapse(1.1)
    assert await answers.keep(KEY, FIRST, {0: tokens(1)})
    assert await answers.claim(KEY, DIGEST, None) is None
