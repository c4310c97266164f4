"""Opens the console in Debian's Chromium."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from playwright.sync_api import Browser, ConsoleMessage, Page, sync_playwright

CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")
TIMEOUT_MILLISECONDS = 20_000

DESKTOP = {"width": 1280, "height": 800}
PHONE = {"width": 375, "height": 720}

EXPECTED_ERRORS = ("Failed to load resource",)
"""What Chromium logs for each response with an error status, and for each lost connection."""


@contextmanager
def open_browser() -> Iterator[Browser]:
    """Start Chromium, without its sandbox if this is the root user, for whom it has none."""
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def open_page(browser: Browser, **options: Any) -> Iterator[Page]:
    """Open a page in a context of its own, with options such as ``color_scheme``. At the end, raise
    AssertionError if a script failed, or if the page's security policy prevented something."""
    context = browser.new_context(**{"viewport": DESKTOP, **options})
    context.set_default_timeout(TIMEOUT_MILLISECONDS)
    page = context.new_page()
    errors: list[str] = []

    def on_message(message: ConsoleMessage) -> None:
        if message.type == "error" and not message.text.startswith(EXPECTED_ERRORS):
            errors.append(message.text)

    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", on_message)
    try:
        yield page
        assert errors == []
    finally:
        context.close()
