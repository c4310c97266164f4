"""Provides a browser, a page, and a router with in-memory workers.

pytest reads this file also when it leaves the tests in this folder out, so playwright is imported
only by the fixtures that need it.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

from baton.text.tokenizer import Tokenizer
from tests import router_harness
from tests.console.console_router import ConsoleRouter, open_console_router

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

tokenizer = router_harness.tokenizer

OpenRouter = Callable[..., ConsoleRouter]


@pytest.fixture(scope="session")
def browser() -> "Iterator[Browser]":
    from tests.console.browser import open_browser

    with open_browser() as running:
        yield running


@pytest.fixture
def page(browser: "Browser") -> "Iterator[Page]":
    from tests.console.browser import open_page

    with open_page(browser) as opened:
        yield opened


@pytest.fixture
def open_router(tokenizer: Tokenizer) -> Iterator[OpenRouter]:
    """Return a function that starts a router with the given settings."""
    with ExitStack() as routers:

        def start(**settings: Any) -> ConsoleRouter:
            return routers.enter_context(open_console_router(tokenizer, **settings))

        yield start
