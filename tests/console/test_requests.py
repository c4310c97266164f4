"""Tests, in a browser, that an answer can be followed through its phases, with the reason for its
placement, and that the chat streams."""

import threading

import httpx
from playwright.sync_api import Page, expect

from tests.console.conftest import OpenRouter
from tests.console.console_router import ConsoleRouter
from tests.router_harness import CHAT, chat

REQUEST_SECONDS = 30.0


def ask(router: ConsoleRouter, **fields: object) -> threading.Thread:
    """Send a chat in a thread."""

    def run() -> None:
        httpx.post(router.url + CHAT, json=chat(**fields), timeout=REQUEST_SECONDS)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_answer_is_followed_through_its_phases(page: Page, open_router: OpenRouter) -> None:
    router = open_router()
    page.goto(f"{router.url}/ui#/requests")
    expect(page.locator(".table-frame .empty")).to_be_visible()
    asking = ask(router)
    row = page.locator("tr.row")
    expect(row).to_contain_text("p0 → d0")
    expect(row.locator(".phase-bar .now")).to_have_class("prefill now")
    row.click()
    panel = page.get_by_role("dialog")
    expect(panel).to_contain_text("d0 has the least load")
    expect(panel.locator("tr.chosen")).to_contain_text("✓ d0")
    expect(panel.locator(".plain tbody tr")).to_have_count(2)
    router.call(router.harness.prefill.step)
    expect(panel.locator(".phase-bar .now")).to_have_class("transfer now")
    router.call(router.harness.decode.step)
    expect(panel.locator(".phase-bar .now")).to_have_class("decode now")
    while asking.is_alive():
        router.call(router.harness.decode.step)
    expect(panel.locator(".phase-bar")).to_contain_text("ended")
    expect(panel).to_contain_text("ended: stop")
    expect(panel).to_contain_text("150 B by shm")
    page.keyboard.press("Escape")
    expect(row).to_contain_text("ended")


def test_answer_waits_in_the_queue_until_it_is_placed(page: Page, open_router: OpenRouter) -> None:
    router = open_router()
    router.call(lambda: setattr(router.placer, "is_held", True))
    page.goto(f"{router.url}/ui#/requests")
    asking = ask(router, max_tokens=1)
    row = page.locator("tr.row")
    expect(row).to_contain_text("not placed")
    expect(row.locator(".phase-bar .now")).to_have_class("queue now")
    expect(page.locator(".phases li", has_text="queue")).to_contain_text("1")
    router.call(lambda: setattr(router.placer, "is_held", False))
    expect(row.locator(".phase-bar .now")).to_have_class("prefill now")
    router.call(router.harness.prefill.step)  # which computes answers of one token
    asking.join(REQUEST_SECONDS)
    expect(row).to_contain_text("ended: length")


def test_answer_that_no_worker_can_serve_is_counted_as_failed(
    page: Page, open_router: OpenRouter
) -> None:
    router = open_router()
    router.call(router.placer.decode.clear)
    ask(router).join(REQUEST_SECONDS)
    page.goto(f"{router.url}/ui#/overview")
    expect(page.locator(".numbers li", has_text="failed")).to_contain_text("1")
    page.goto(f"{router.url}/ui#/requests")
    expect(page.locator("tr.row")).to_contain_text("ended: error")


def test_chat_streams_as_plain_text(page: Page, open_router: OpenRouter) -> None:
    router = open_router(api_keys={"sk-one": "alice"})
    page.goto(f"{router.url}/ui#/chat")
    message = page.get_by_label("Message")
    message.fill("<b>Hello</b>")
    page.get_by_label("API key").fill("sk-one")
    message.press("Enter")
    answer = page.locator(".message.assistant")
    expect(page.locator(".message.user pre")).to_have_text("<b>Hello</b>")
    expect(answer).to_contain_text("…")
    router.call(router.harness.prefill.step)
    expect(answer.locator("pre")).to_have_text("A")
    for _ in range(len("A short answer.") + 1):
        router.call(router.harness.decode.step)
    expect(answer.locator("pre")).to_have_text("A short answer.")
    answer.get_by_role("link", name="where it ran").click()
    expect(page.get_by_role("dialog")).to_contain_text("d0 has the least load")


def test_chat_shows_why_a_request_is_refused(page: Page, open_router: OpenRouter) -> None:
    router = open_router(api_keys={"sk-one": "alice"})
    page.goto(f"{router.url}/ui#/chat")
    page.get_by_label("Message").fill("Hello")
    page.get_by_role("button", name="Send").click()
    expect(page.get_by_role("alert")).to_contain_text("an API key is needed")
    expect(page.get_by_label("Message")).to_have_value("Hello")
    expect(page.get_by_label("API key")).to_be_visible()
