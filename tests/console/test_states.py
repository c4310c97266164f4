"""Tests, in a browser, what the console shows when something is missing or wrong, in both color
schemes, on a phone, and with the keyboard only."""

import re
from dataclasses import replace

import pytest
from playwright.sync_api import Browser, Page, expect

from baton.core.states import Role, WorkerState
from baton.core.worker_kinds import WORKER_KINDS
from baton.network.free_port import free_port
from baton.text.tokenizer import Tokenizer
from tests.console.browser import DESKTOP, PHONE, open_page
from tests.console.conftest import OpenRouter
from tests.console.console_router import CONDUCTOR, mock_worker, open_console_router

VIEWS = ("overview", "workers", "requests", "cache", "tenants", "chat")
RECONNECT_MILLISECONDS = 30_000


def test_start_page_leads_to_the_console(page: Page, open_router: OpenRouter) -> None:
    page.goto(open_router().url)
    page.get_by_role("link", name="Open the console").click()
    expect(page.get_by_role("heading", name="Chat")).to_be_visible()
    expect(page.locator(".live")).to_have_text("live")
    page.get_by_role("link", name="overview").click()
    expect(page.get_by_role("heading", name="Overview")).to_be_visible()


def test_wrong_key_is_refused_and_the_right_one_is_kept_for_the_tab(
    page: Page, open_router: OpenRouter
) -> None:
    router = open_router(admin_key="correct horse")
    page.goto(f"{router.url}/ui#/overview")
    field = page.get_by_label("Admin key")
    field.fill("wrong")
    page.get_by_role("button", name="Open").click()
    expect(page.get_by_text("The key is wrong.")).to_be_visible()
    field.fill("correct horse")
    page.get_by_role("button", name="Open").click()
    expect(page.get_by_role("heading", name="Overview")).to_be_visible()
    page.reload()
    expect(page.get_by_role("heading", name="Overview")).to_be_visible()
    page.get_by_role("button", name="forget the admin key").click()
    expect(page.get_by_label("Admin key")).to_be_visible()
    assert page.evaluate("localStorage.length + document.cookie.length") == 0


def test_missing_conductor_is_explained(page: Page, open_router: OpenRouter) -> None:
    router = open_router()
    page.goto(f"{router.url}/ui#/overview")
    expect(page.locator(".live")).to_have_text("live")
    expect(page.locator(".no-conductor")).to_have_count(0)
    workers = [each for each in router.harness.members.list if each is not CONDUCTOR]
    router.set_members(workers)
    expect(page.locator(".no-conductor")).to_contain_text("place requests by the hash ring")
    expect(page.locator(".events")).to_contain_text("the last conductor is gone")
    router.set_members([*workers, CONDUCTOR])
    expect(page.locator(".no-conductor")).to_have_count(0)


def test_drain_is_followed_to_its_end(page: Page, open_router: OpenRouter) -> None:
    worker = mock_worker(1, Role.DECODE)
    others = [mock_worker(number, role) for number in (2, 3) for role in WORKER_KINDS]

    def set_state(state: WorkerState, running: int) -> None:
        load = replace(worker.load, running=running)
        router.set_members([replace(worker, state=state, load=load), *others, CONDUCTOR])

    router = open_router(members=[worker, *others, CONDUCTOR])
    page.goto(f"{router.url}/ui#/workers/{worker.id}")
    panel = page.get_by_role("dialog")
    set_state(WorkerState.READY, 8)
    expect(panel).to_contain_text("Running8")
    for running, width in ((8, "0%"), (2, "75%"), (0, "100%")):
        set_state(WorkerState.DRAINING, running)
        expect(panel.locator(".bar")).to_have_text(f"draining, {running} left")
        expect(panel.locator(".bar i")).to_have_attribute("style", f"width: {width};")
    router.set_members([*others, CONDUCTOR])
    expect(panel).to_contain_text("has drained and left the cluster")


def test_worker_that_dies_is_a_warning(page: Page, open_router: OpenRouter) -> None:
    workers = [mock_worker(number, role) for number in (2, 3) for role in WORKER_KINDS]
    router = open_router(members=[*workers, CONDUCTOR])
    page.goto(f"{router.url}/ui#/overview")
    expect(page.locator(".live")).to_have_text("live")
    router.set_members([*workers[1:], CONDUCTOR])
    expect(page.locator(".events .warning")).to_contain_text("prefill-2 left without draining")


def test_empty_cluster_says_what_to_do(page: Page, open_router: OpenRouter) -> None:
    router = open_router(members=[CONDUCTOR])
    page.goto(f"{router.url}/ui#/overview")
    expect(page.locator(".empty-cluster")).to_contain_text("baton up")
    for view, text in (
        ("workers", "No workers are registered."),
        ("requests", "No request is in flight."),
        ("cache", "There are no KV store nodes."),
        ("tenants", "No tenant has sent a request yet."),
    ):
        page.goto(f"{router.url}/ui#/{view}")
        expect(page.locator(".table-frame .empty")).to_contain_text(text)


def test_lost_connection_is_shown_and_comes_back(page: Page, tokenizer: Tokenizer) -> None:
    port = free_port()
    with open_console_router(tokenizer, port) as router:
        page.goto(f"{router.url}/ui#/overview")
        expect(page.locator(".live")).to_have_text("live")
    expect(page.locator(".notice.lost")).to_contain_text("what it shows is old")
    expect(page.get_by_role("heading", name="Overview")).to_be_visible()
    with open_console_router(tokenizer, port):
        expect(page.locator(".live")).to_have_text("live", timeout=RECONNECT_MILLISECONDS)
        expect(page.locator(".notice.lost")).to_have_count(0)


def test_router_without_a_supervisor_says_why_it_can_not_drain(
    page: Page, open_router: OpenRouter
) -> None:
    page.goto(f"{open_router().url}/ui#/workers/d0")
    panel = page.get_by_role("dialog")
    expect(panel).to_contain_text("was not started by baton up")
    expect(panel.get_by_role("button", name="Drain")).to_have_count(0)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_both_color_schemes(browser: Browser, open_router: OpenRouter, scheme: str) -> None:
    url = open_router().url
    with open_page(browser, color_scheme=scheme) as page:
        page.goto(f"{url}/ui#/overview")
        expect(page.locator(".pool").first).to_be_visible()
        style = "getComputedStyle(document.body)"
        colors = page.evaluate(f"[{style}.color, {style}.backgroundColor]")
    text, background = (sum(map(int, re.findall(r"\d+", color)[:3])) for color in colors)
    assert (text < background) == (scheme == "light")
    assert abs(text - background) > 450  # of 765


@pytest.mark.parametrize("size", [PHONE, DESKTOP], ids=["phone", "desktop"])
def test_no_view_is_wider_than_the_screen(
    browser: Browser, open_router: OpenRouter, size: dict[str, int]
) -> None:
    url = open_router().url
    with open_page(browser, viewport=size) as page:
        for view in VIEWS:
            page.goto(f"{url}/ui#/{view}")
            expect(page.locator("main h1")).to_contain_text(view.capitalize())
            width = page.evaluate("document.documentElement.scrollWidth")
            assert width <= size["width"], view


def test_keyboard_opens_and_closes_a_worker(page: Page, open_router: OpenRouter) -> None:
    page.goto(f"{open_router().url}/ui#/workers")
    row = page.locator("tr[data-id=p0]")
    row.focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog")).to_contain_text("KV memory")
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)
    assert set(page.locator("td.column-role").all_inner_texts()) == {"prefill", "decode"}
