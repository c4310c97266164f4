"""Tests cache breakpoints in a prompt (``cache_control``): their positions, and the pin requests to
the stores."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import orjson
import pytest

from baton.clock import ManualClock, SystemClock
from baton.core.ids import BlockKey, Epoch, Incarnation, RequestId, WorkerId
from baton.core.kv_transfer import WorkerRef
from baton.core.member import Member
from baton.core.placement import Placement
from baton.core.states import Role
from baton.errors import Overloaded
from baton.text.tokenizer import Tokenizer
from router.errors import ApiError
from router.generation.cluster import Cluster
from router.generation.prefix_pinner import STORE_ARRIVAL_TIMEOUT_SECONDS, PrefixPin, PrefixPinner
from router.generation.record import GenerationRecord
from router.http.body_parser import parse_body
from router.openai.schema import ChatBody
from router.serving.cache_breakpoints import find_prefix_pins
from router.serving.request import Chat
from tests import router_harness
from tests.router_harness import CHAT, StaticMembers, member, open_harness

tokenizer = router_harness.tokenizer
SHORT = {"type": "ephemeral"}
LONG = {"type": "ephemeral", "ttl": "1h"}
LIMIT = 10_000
KEYS = [BlockKey(bytes([number]) * 16) for number in range(64)]


def part(text: str, control: Any = None) -> dict[str, Any]:
    return {"type": "text", "text": text, **({"cache_control": control} if control else {})}


def pins(tokenizer: Tokenizer, *messages: dict[str, Any]) -> tuple[PrefixPin, ...]:
    body = parse_body(ChatBody, orjson.dumps({"messages": messages}))
    ids = tokenizer.encode(_rendered(tokenizer, body), add_special_tokens=False)
    return find_prefix_pins(Chat(body.messages), tokenizer, ids, KEYS, 4, LIMIT)


def _rendered(tokenizer: Tokenizer, body: ChatBody) -> str:
    messages = [{"role": each.role, "content": each.content} for each in body.messages]
    return tokenizer.apply_chat_template(messages, None, max_characters=LIMIT)


def test_breakpoint_lies_after_its_part(tokenizer: Tokenizer) -> None:
    content = [part("abc"), part("defg", SHORT), part("hi")]
    [pin] = pins(tokenizer, {"role": "user", "content": content})
    # <|im_start|> is one token, "user\n" five, "abcdefg" seven.
    assert pin == PrefixPin(13, tuple(KEYS[:3]), 300.0)


def test_message_may_have_a_breakpoint_at_its_end(tokenizer: Tokenizer) -> None:
    system = {"role": "system", "content": "abc", "cache_control": LONG}
    [pin] = pins(tokenizer, system, {"role": "user", "content": "abc"})
    assert pin == PrefixPin(11, tuple(KEYS[:2]), 3600.0)


def test_longest_prefix_for_each_ttl_is_pinned(tokenizer: Tokenizer) -> None:
    system = {"role": "system", "content": [part("rules", LONG), part("x", SHORT)]}
    user = {"role": "user", "content": [part("document", SHORT), part("question")]}
    found = pins(tokenizer, system, user)
    assert [(pin.ttl_seconds, pin.num_tokens) for pin in found] == [(3600.0, 13), (300.0, 30)]
    reverse = pins(tokenizer, {"role": "user", "content": [part("ab", SHORT), part("c", LONG)]})
    assert [pin.ttl_seconds for pin in reverse] == [
        3600.0
    ]  # the longer prefix includes the shorter


def test_prompt_without_breakpoints_has_no_pins(tokenizer: Tokenizer) -> None:
    assert pins(tokenizer, {"role": "user", "content": [part("a"), part("b")]}) == ()


def test_our_marker_characters_in_a_message_are_plain_text(tokenizer: Tokenizer) -> None:
    plain = pins(tokenizer, {"role": "user", "content": [part("a\ue0010\ue001b", SHORT)]})
    assert plain[0].num_tokens == 6 + len("a\ue0010\ue001b".encode())


@pytest.mark.parametrize(
    ("control", "complaint"),
    [
        ({"type": "forever"}, "cache_control must be like"),
        ("ephemeral", "cache_control must be like"),
        ({"type": "ephemeral", "ttl": "1d"}, "cache_control.ttl must be one of 5m, 1h"),
        ({"type": "ephemeral", "ttl": 300}, "cache_control.ttl must be one of 5m, 1h"),
        ({"type": "ephemeral", "TTL": "1h"}, "did you mean 'ttl'?"),
    ],
)
async def test_invalid_breakpoints_are_rejected(
    tokenizer: Tokenizer, control: Any, complaint: str
) -> None:
    async with open_harness(tokenizer) as (_, client):
        for message in (
            {"role": "user", "content": [part("a", control)]},
            {"role": "user", "content": "a", "cache_control": control},
        ):
            response = await client.post(CHAT, json={"messages": [message]})
            assert response.status_code == 400, response.text
            assert complaint in response.json()["error"]["message"]


def test_too_many_breakpoints_are_rejected(tokenizer: Tokenizer) -> None:
    with pytest.raises(ApiError, match="at most 4 cache breakpoints, not 5"):
        pins(tokenizer, {"role": "user", "content": [part("a", SHORT)] * 5})


# The stores


class FakeStores:
    """Store nodes. Node NAME has the first ``held[NAME]`` blocks of every prefix; nodes in ``full``
    refuse to pin blocks."""

    def __init__(self, **held: int) -> None:
        self.held = held
        self.full: set[str] = set()
        self.pins: list[tuple[str, int, float]] = []

    async def pin(self, store: Member, keys: Sequence[BlockKey], seconds: float) -> int:
        self.pins.append((store.id, len(keys), seconds))
        if store.id in self.full:
            raise Overloaded("too many blocks are pinned")
        return min(self.held[store.id], len(keys))

    async def close(self) -> None:
        """Do nothing: there is nothing to close."""


def on(host: str, name: str, role: Role) -> Member:
    return member(name, role, host=host)


class Bench:
    def __init__(self, stores: FakeStores) -> None:
        self.stores = stores
        self.clock = ManualClock()
        members = [on("h1", "k1", Role.KVSTORE), on("h2", "k2", Role.KVSTORE)]
        self.members = StaticMembers([*members, on("h2", "p0", Role.PREFILL)])
        self.cluster = Cluster(self.members, self.clock)
        self.pinner = PrefixPinner(self.cluster, stores, self.clock)
        self.record = GenerationRecord(RequestId("r"), 0.0, 20)
        prefill = WorkerRef(WorkerId("p0"), "p0:1", Incarnation(1))
        decode = WorkerRef(WorkerId("d0"), "d0:1", Incarnation(1))
        self.record.record_placement(Epoch(1), Placement(prefill, decode, "test"), 0.0)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        await self.cluster.refresh()
        running = asyncio.create_task(self.pinner.run())
        await settle()
        yield
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    async def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)
        await settle()


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


PIN = PrefixPin(18, tuple(KEYS[:4]), 300.0)


async def test_local_store_pins_the_prefix_once_the_prompt_is_computed() -> None:
    bench = Bench(FakeStores(k1=0, k2=4))
    async with bench.running():
        bench.pinner.pin_when_stored(bench.record, [PIN])
        await bench.wait(1.0)
        assert bench.stores.pins == []
        bench.record.cached_tokens = 0
        await bench.wait(1.0)
        assert bench.stores.pins == [("k2", 4, 300.0)]
        [noted] = bench.record.explain()["pins"]
        assert noted == {
            "num_tokens": 18, "seconds": 300.0, "pinned_blocks": 4, "store": "k2", "error": "",
        }  # fmt: skip


async def test_blocks_that_arrive_late_are_waited_for() -> None:
    bench = Bench(FakeStores(k1=0, k2=1))
    async with bench.running():
        bench.record.cached_tokens = 0
        bench.pinner.pin_when_stored(bench.record, [PIN])
        await settle()
        [noted] = bench.record.pins
        assert (noted.pinned_blocks, noted.error) == (
            1,
            "3 of 4 blocks are not in the store's DRAM",
        )
        bench.stores.held["k2"] = 4
        await bench.wait(0.1)
        assert (noted.pinned_blocks, noted.error) == (4, "")


async def test_store_that_can_not_pin_is_not_asked_for_ever() -> None:
    bench = Bench(FakeStores(k1=0, k2=4))
    bench.stores.full = {"k2"}
    async with bench.running():
        bench.record.cached_tokens = 0
        bench.pinner.pin_when_stored(bench.record, [PIN])
        bench.record.record_end("stop", 1.0)
        for _ in range(20):
            await bench.wait(STORE_ARRIVAL_TIMEOUT_SECONDS / 5)
        num_pins = len(bench.stores.pins)
        await bench.wait(100.0)
        assert len(bench.stores.pins) == num_pins
        assert bench.record.pins[0].pinned_blocks == 0


async def test_prompt_that_was_not_computed_is_not_pinned() -> None:
    bench = Bench(FakeStores(k1=4, k2=4))
    async with bench.running():
        bench.pinner.pin_when_stored(bench.record, [PIN, PrefixPin(2, (), 3600.0)])
        bench.record.record_end("error", 1.0)
        await bench.wait(1.0)
        assert [noted.error for noted in bench.record.pins] == [
            "the prompt was not computed",
            "no full block is before the breakpoint",
        ]
        assert bench.stores.pins == []


async def test_prefix_of_an_answered_chat_is_pinned(tokenizer: Tokenizer) -> None:
    async with open_harness(tokenizer) as (router, client):
        router.members.list.append(member("k0", Role.KVSTORE))
        await router.service.cluster.refresh()
        stores = FakeStores(k0=64)
        pinner = PrefixPinner(router.service.cluster, stores, SystemClock())
        router.model.prefix_pinner = pinner
        running = asyncio.create_task(pinner.run())
        await settle()
        content = [part("a long document", SHORT), part("?")]
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 8}
        response: httpx.Response = await client.post(CHAT, json=body)
        assert response.status_code == 200, response.text
        async with asyncio.timeout(60):
            while not stores.pins:
                await asyncio.sleep(0.01)
        assert stores.pins == [("k0", 5, 300.0)]  # 21 tokens
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
