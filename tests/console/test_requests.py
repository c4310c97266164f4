"""Tests, in a browser, that an answer can be followed through its phases, with the reason for its
placement, and that the chat streams."""

import threading

import httpx
from playwright.sync_api import Page, expect

from tests.console.conftest import OpenRouter
from tests.console.console_router import ConsoleRouter
from tests.router_harness import CHAT, chat

REQUEST_SECONDS = 60.0


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


def test_queue_is_a_phase_of_its_own(page: Page, open_router: OpenRouter) -> None:
    router = open_router()
    placer = router.harness.service.generation_context.placer
    decode = list(placer.decode)  # type: ignore[attr-defined]
    router.call(placer.decode.clear)  # type: ignore[attr-defined]
    page.goto(f"{router.url}/ui#/requests")
    expect(page.locator(".live")).to_have_text("live")
    # Nobody can serve it, so it waits for a while, and is then refused.
    asking = ask(router)
    asking.join(REQUEST_SECONDS)
    router.call(lambda: placer.decode.extend(decode))  # type: ignore[attr-defined]
    page.goto(f"{router.url}/ui#/overview")
    failed = page.locator(".numbers li", has_text="failed")
    expect(failed).to_contain_text("1")


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
