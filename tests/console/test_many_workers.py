"""Tests, in a browser, that the console shows 1,000 workers, and prints how long that takes."""

from dataclasses import replace

from playwright.sync_api import Page, expect

from baton.core.states import WorkerState
from tests.console.conftest import OpenRouter
from tests.console.console_router import CONDUCTOR, mock_workers
from tests.console.measure import measure_render_milliseconds, measure_scroll

NUM_WORKERS = 1000
HANG_MILLISECONDS = 15_000
"""Far above what a loaded machine needs. The figures are in docs/results/console.md."""


def test_a_thousand_workers_render_and_scroll(page: Page, open_router: OpenRouter) -> None:
    workers = mock_workers(NUM_WORKERS)
    router = open_router(members=[*workers, CONDUCTOR])
    milliseconds = measure_render_milliseconds(page, router.url)
    assert page.locator("tr.row").count() < 100
    scroll = measure_scroll(page)
    print(f"\n{NUM_WORKERS} workers: rendered after {milliseconds:.0f} ms; scroll frames {scroll}")
    assert milliseconds < HANG_MILLISECONDS and scroll["max"] < HANG_MILLISECONDS
    assert scroll["top"] == 120 * 90

    page.get_by_label("Filter workers").fill("decode host-3 draining")
    expect(page.locator(".table-frame .empty")).to_have_text("No worker matches.")
    draining = [
        replace(each, state=WorkerState.DRAINING) if each.id == "decode-25" else each
        for each in workers
    ]
    router.set_members([*draining, CONDUCTOR])
    expect(page.locator("tr.row")).to_contain_text("decode-25")
    expect(page.locator("main h1")).to_contain_text("1 of 1,000")
