"""Provides a browser, a page, and a router with in-memory workers."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from playwright.sync_api import Browser, Page

from baton.text.tokenizer import Tokenizer
from tests import router_harness
from tests.console.browser import open_browser, open_page
from tests.console.console_router import ConsoleRouter, open_console_router

tokenizer = router_harness.tokenizer

OpenRouter = Callable[..., ConsoleRouter]


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    with open_browser() as running:
        yield running


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    with open_page(browser) as opened:
        yield opened


@pytest.fixture
def open_router(tokenizer: Tokenizer) -> Iterator[OpenRouter]:
    """Return a function that starts a router with the given settings."""
    with ExitStack() as routers:

        def start(**settings: Any) -> ConsoleRouter:
            return routers.enter_context(open_console_router(tokenizer, **settings))

        yield start
