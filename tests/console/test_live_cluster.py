"""Tests the console of a cluster that `baton up` started, in a browser: a resize under load is seen
as it happens, a drain is followed to its end, and the death of the conductor is noticed."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect

from testkit.local_cluster import LocalCluster, local_cluster
from tests.console.browser import open_page

SLOW = 60_000
"""Milliseconds in which a worker starts or drains on a busy machine."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with local_cluster() as running:
        yield running


@pytest.fixture
def page(browser: Browser, cluster: LocalCluster) -> Iterator[Page]:
    with open_page(browser) as opened:
        opened.goto(f"{cluster.url}/ui#/overview")
        expect(opened.locator(".live")).to_have_text("live")
        yield opened


@contextmanager
def load(cluster: LocalCluster, num_streams: int = 3) -> Iterator[list[int]]:
    """Send requests from ``num_streams`` threads. Yield a list of the responses' statuses."""
    statuses: list[int] = []
    stop = threading.Event()

    def send(number: int) -> None:
        body = {"prompt": f"def f{number}(x):", "max_tokens": 64, "ignore_eos": True}
        while not stop.is_set():
            response = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=60)
            statuses.append(response.status_code)

    threads = [threading.Thread(target=send, args=(number,)) for number in range(num_streams)]
    for thread in threads:
        thread.start()
    try:
        yield statuses
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_resize_and_drain_under_load_are_seen_as_they_happen(
    page: Page, cluster: LocalCluster
) -> None:
    decode = page.locator("[data-pool=decode]")
    expect(decode.locator(".size")).to_have_text("1 ready of 1 wanted")
    with load(cluster) as statuses:
        decode.get_by_label("Number of decode workers").fill("2")
        decode.get_by_role("button", name="Resize").click()
        expect(decode.locator(".size")).to_contain_text("of 2 wanted")
        expect(decode.locator(".bar.progress")).to_contain_text("1 of 2 ready")
        expect(decode.locator(".size")).to_have_text("2 ready of 2 wanted", timeout=SLOW)
        events = page.locator(".events")
        expect(events).to_contain_text("decode pool: 1 → 2 workers requested")
        expect(events).to_contain_text("decode-1 joined as decode worker")

        page.goto(f"{cluster.url}/ui#/workers/decode-0")
        panel = page.get_by_role("dialog")
        panel.get_by_role("button", name="Drain").click()
        panel.get_by_role("button", name="Drain and remove it?").click()
        expect(panel).to_contain_text("has drained and left the cluster", timeout=SLOW)
        page.goto(f"{cluster.url}/ui#/overview")
        expect(events).to_contain_text("decode-0: drain requested here")
        expect(events).to_contain_text("decode-0 has drained and left")
        expect(decode.locator(".size")).to_have_text("1 ready of 1 wanted", timeout=SLOW)
    assert set(statuses) == {200}


def test_invalid_size_is_refused_with_the_reason(page: Page, cluster: LocalCluster) -> None:
    page.goto(f"{cluster.url}/ui#/workers")
    only = page.locator("tr.row", has_text="prefill-")
    only.click()
    panel = page.get_by_role("dialog")
    panel.get_by_role("button", name="Drain").click()
    panel.get_by_role("button", name="Drain and remove it?").click()
    expect(panel.get_by_role("alert")).to_contain_text("the last prefill worker")


def test_cache_view_shows_the_store_and_the_ring(page: Page, cluster: LocalCluster) -> None:
    prompt = "def read_a_file(path):\n" * 20
    for _ in range(2):
        cluster.post("/v1/completions", {"prompt": prompt, "max_tokens": 2, "ignore_eos": True})
    page.goto(f"{cluster.url}/ui#/cache")
    expect(page.locator("tr[data-id=kvstore]")).to_contain_text("MiB", timeout=SLOW)
    expect(page.locator(".ring .strip i")).to_have_count(1)
    expect(page.locator(".card", has_text="Hit rates")).not_to_contain_text("of 0 prompt tokens")


def test_death_of_the_conductor_is_noticed(page: Page, cluster: LocalCluster) -> None:
    [conductor] = cluster.processes("conductor")
    os.kill(conductor["pid"], signal.SIGSTOP)
    try:
        # Its registration ends, and requests are placed by the ring.
        expect(page.locator(".no-conductor")).to_be_visible(timeout=SLOW)
        cluster.post("/v1/completions", {"prompt": "x = 1", "max_tokens": 2})
    finally:
        os.kill(conductor["pid"], signal.SIGCONT)
    expect(page.locator(".no-conductor")).to_have_count(0, timeout=SLOW)
