"""Takes the pictures of the console for the documents, from a cluster of mock workers under load.

make setup-console
PYTHONPATH=.console/packages python -m tests.console.pictures [--folder docs/pictures]
"""

import argparse
import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from playwright.sync_api import Page

from testkit.local_cluster import LocalCluster, local_cluster
from tests.console.browser import PHONE, open_browser, open_page

FOLDER = Path("docs/pictures")
CLUSTER: dict[str, object] = {
    "mock": True,
    "mock_step_seconds": 0.03,
    "mock_prefill_tokens_per_second": 1500,
}
NUM_STREAMS = 24
WARM_UP_MILLISECONDS = 75_000
"""Enough for charts with several points, and for a full window of recent answers."""

SIZE = {"width": 1200, "height": 750}
PROMPTS = ("def read(path):\n", "class Reader:\n", "import os\n", "async def main():\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    folder: Path = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    with local_cluster(prefill=3, decode=4, settings=CLUSTER) as cluster, open_browser() as browser:
        url = cluster.url
        light = open_page(browser, viewport=SIZE, color_scheme="light")
        dark = open_page(browser, viewport=SIZE, color_scheme="dark")
        phone = open_page(browser, viewport=PHONE, color_scheme="dark")
        with _load(cluster), light as overview, dark as request, phone as small:
            for page in (overview, request, small):
                page.goto(f"{url}/ui#/overview")
            overview.wait_for_timeout(WARM_UP_MILLISECONDS)
            _take(overview, folder / "console-overview.png")
            _take(small, folder / "console-phone.png")
            request.goto(f"{url}/ui#/requests")
            request.locator("tr.row", has_text="decode").nth(3).click()
            request.get_by_role("dialog").locator("tr.chosen").first.wait_for()
            _take(request, folder / "console-request.png")


def _take(page: Page, path: Path) -> None:
    page.wait_for_timeout(300)
    page.screenshot(path=path, animations="disabled")
    print(f"{path}: {path.stat().st_size // 1024} KiB")


@contextmanager
def _load(cluster: LocalCluster) -> Iterator[None]:
    """Send requests from :data:`NUM_STREAMS` threads, with prompts and answers of many lengths."""
    stop = threading.Event()

    def send(stream: int) -> None:
        for number in itertools.count(stream):
            if stop.is_set():
                return
            prompt = PROMPTS[number % len(PROMPTS)] * (10 + 7 * (number % 23))
            body = {"prompt": prompt, "max_tokens": 40 + 31 * (number % 11), "ignore_eos": True}
            httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=60)

    threads = [threading.Thread(target=send, args=(number,)) for number in range(NUM_STREAMS)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


if __name__ == "__main__":
    main()
