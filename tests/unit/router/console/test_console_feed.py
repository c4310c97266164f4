"""Tests the console's frames: pages share them, get only what changed, and skip frames if they are
slow."""

import asyncio
import json
from typing import Any

import pytest

from baton.clock import ManualClock
from baton.errors import Overloaded
from router.console.feed import ConsoleFeed, ConsolePage
from router.console.state import ConsoleState
from router.limits import MAX_PAGES


class Source:
    """Counts how often a state is built, and returns ``rows`` as its only table."""

    def __init__(self) -> None:
        self.num_builds = 0
        self.rows: dict[str, Any] = {
            "a": {"load": 1, "host": "x"},
            "b": {"load": 1},
            "d": {"error": "it does not answer"},
        }

    async def build(self) -> ConsoleState:
        self.num_builds += 1
        return ConsoleState({"build": self.num_builds}, {"workers": dict(self.rows)})


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(100.0)


@pytest.fixture
def source() -> Source:
    return Source()


@pytest.fixture
def feed(source: Source, clock: ManualClock) -> ConsoleFeed:
    return ConsoleFeed(source.build, clock)


async def tick(clock: ManualClock, *pages: ConsolePage) -> list[Any]:
    """Return each page's next frame, a second later."""
    waiting = [asyncio.create_task(page.next_frame()) for page in pages]
    await asyncio.sleep(0)
    clock.advance(1.0)
    return [json.loads(frame) for frame in await asyncio.gather(*waiting)]


async def test_first_frame_is_full_and_later_ones_contain_changes(
    feed: ConsoleFeed, source: Source, clock: ManualClock
) -> None:
    with feed.open_page() as page:
        first = json.loads(await page.next_frame())
        assert first["is_full"]
        assert first["tables"] == {"workers": {"rows": source.rows}}
        source.rows = {
            "a": {"load": 2, "host": "x"},
            "c": {"load": 5},
            "d": {"load": 1, "error": ""},
        }
        [second] = await tick(clock, page)
        changed = {
            "workers": {
                "rows": {"c": {"load": 5}, "d": {"load": 1, "error": ""}},
                "fields": {"a": {"load": 2}},
                "removed": ["b"],
            }
        }
        assert (second["is_full"], second["number"], second["tables"]) == (False, 2, changed)
        [third] = await tick(clock, page)
        assert (third["cluster"], third["tables"]) == ({"build": 3}, {})


async def test_pages_share_one_frame_a_second(
    feed: ConsoleFeed, source: Source, clock: ManualClock
) -> None:
    with feed.open_page() as one, feed.open_page() as two:
        await one.next_frame()
        await two.next_frame()
        assert source.num_builds == 1
        frames = await tick(clock, one, two)
        assert source.num_builds == 2
        assert frames[0] == frames[1]


async def test_slow_page_skips_frames_and_gets_a_full_one(
    feed: ConsoleFeed, source: Source, clock: ManualClock
) -> None:
    with feed.open_page() as fast, feed.open_page() as slow:
        await fast.next_frame()
        await slow.next_frame()
        for _ in range(3):
            await tick(clock, fast)
        frame = json.loads(await slow.next_frame())
        assert (frame["number"], frame["is_full"]) == (4, True)
        assert source.num_builds == 4


async def test_no_state_is_built_without_a_page(
    feed: ConsoleFeed, source: Source, clock: ManualClock
) -> None:
    with feed.open_page() as page:
        await page.next_frame()
    clock.advance(3600.0)
    await asyncio.sleep(0)
    assert source.num_builds == 1
    with feed.open_page() as page:
        frame = json.loads(await page.next_frame())
    assert (frame["is_full"], frame["cluster"]) == (True, {"build": 2})


async def test_page_that_leaves_while_it_builds_does_not_stop_the_others(
    feed: ConsoleFeed, source: Source, clock: ManualClock
) -> None:
    with feed.open_page() as one, feed.open_page() as two:
        await one.next_frame()
        await two.next_frame()
        leaving = asyncio.create_task(one.next_frame())
        staying = asyncio.create_task(two.next_frame())
        await asyncio.sleep(0)
        leaving.cancel()
        await asyncio.sleep(0.001)  # the other page takes over
        clock.advance(1.0)
        assert json.loads(await staying)["number"] == 2


async def test_number_of_pages_is_bounded(feed: ConsoleFeed) -> None:
    pages = [feed.open_page() for _ in range(MAX_PAGES)]
    for page in pages:
        page.__enter__()
    with pytest.raises(Overloaded, match="16 pages of the console"), feed.open_page():
        pass
    pages[0].__exit__(None, None, None)
    with feed.open_page():
        assert feed.num_pages == MAX_PAGES
    for page in pages[1:]:
        page.__exit__(None, None, None)
    assert feed.num_pages == 0


async def test_snapshots_cost_at_most_one_state_a_second(
    feed: ConsoleFeed, source: Source, clock: ManualClock
) -> None:
    for _ in range(5):
        assert json.loads(await feed.snapshot())["is_full"]
    assert source.num_builds == 1
    clock.advance(1.0)
    assert json.loads(await feed.snapshot())["cluster"] == {"build": 2}
