"""Measure the console: how long it takes to render 1,000 workers in a browser, how smoothly it
scrolls, and what its pages cost the router.

    make setup-console
    PYTHONPATH=.console/packages python -m benchmarks.console [--workers N] [--pages N]

The router runs in a process of its own, from its HTTP server to the generations, with in-memory
workers. A fifth of the registered workers reports another load every half second, and ``--streams``
answers get a token every 0.1 s, so that frames contain about what those of a busy cluster do. The
router's CPU time is measured without pages and with ``--pages`` clients that read the stream of
frames, in turns. The clients are not browsers, which would use the CPU that is measured.
"""

import argparse
import asyncio
import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from operator import sub
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import psutil

from baton.text.tokenizer import Tokenizer
from benchmarks.machine import describe
from router.program import tune_garbage_collector
from tests.console.console_router import CONDUCTOR, mock_workers
from tests.router_harness import CHAT, RouterHarness, chat, serve_over_tcp, write_tokenizer

REPORT_SECONDS = 0.5
CHANGED_SHARE = 5
"""One in this many workers has another load in each report."""

TOKEN_SECONDS = 0.1
SETTLE_SECONDS = 3.0
ROUNDS = 3
REPETITIONS = 5


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--streams", type=int, default=100)
    parser.add_argument("--pages", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=20.0, help="per measurement of CPU")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        asyncio.run(_serve(arguments.workers))
        return
    with _router_process(arguments.workers) as (process, url):
        result = {
            **describe(),
            "workers": arguments.workers,
            "streams": arguments.streams,
            **_measure_browser(url),
            **asyncio.run(_measure_cpu(process, url, arguments)),
        }
    print(json.dumps(result))


# -- the router ----------------------------------------------------------------------------------


async def _serve(num_workers: int) -> None:
    """Serve until killed; print the URL."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = Tokenizer.load(write_tokenizer(Path(folder)))
    router = RouterHarness(
        tokenizer, "x", False, next_token=lambda known, spec: 120, max_concurrent_requests=1024
    )
    tune_garbage_collector()
    router.members.list = [*router.members.list, *mock_workers(num_workers), CONDUCTOR]
    async with serve_over_tcp(router) as url, asyncio.TaskGroup() as tasks:
        print(url, flush=True)
        tasks.create_task(_generate(router))
        tasks.create_task(router.service.cluster.run())
        await _report_loads(router)


async def _report_loads(router: RouterHarness) -> None:
    report = 0
    while True:
        report += 1
        router.members.list = [
            replace(member, load=replace(member.load, running=report % 50))
            if number % CHANGED_SHARE == report % CHANGED_SHARE and member.load.num_blocks
            else member
            for number, member in enumerate(router.members.list)
        ]
        await asyncio.sleep(REPORT_SECONDS)


async def _generate(router: RouterHarness) -> None:
    while True:
        router.prefill.step()
        router.decode.step()
        await asyncio.sleep(TOKEN_SECONDS)


@contextlib.contextmanager
def _router_process(num_workers: int) -> Iterator[tuple[psutil.Process, str]]:
    command = [sys.executable, "-m", "benchmarks.console", "--serve", "--workers", str(num_workers)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        try:
            yield psutil.Process(child.pid), child.stdout.readline().strip()
        finally:
            child.kill()


# -- the browser ---------------------------------------------------------------------------------


def _measure_browser(url: str) -> dict[str, Any]:
    from tests.console.browser import open_browser, open_page
    from tests.console.measure import measure_render_milliseconds, measure_scroll

    renders, scrolls = [], []
    with open_browser() as browser:
        for _ in range(REPETITIONS):
            with open_page(browser) as page:
                renders.append(measure_render_milliseconds(page, url))
                scrolls.append(measure_scroll(page))
    print(f"rendered after {sorted(map(round, renders))} ms; scroll frames: {scrolls[-1]}")
    return {
        "render_milliseconds": round(median(renders)),
        "render_max_milliseconds": round(max(renders)),
        "scroll_frame_p50_milliseconds": round(median(each["p50"] for each in scrolls), 1),
        "scroll_frame_p95_milliseconds": round(median(each["p95"] for each in scrolls), 1),
    }


# -- the router's CPU ----------------------------------------------------------------------------


async def _measure_cpu(
    process: psutil.Process, url: str, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Measure the router's CPU time without and with pages, in turns."""
    without, with_pages, sizes, num_bytes = [], [], [0], 0
    async with httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=None)) as client:
        async with asyncio.TaskGroup() as tasks:
            streams = [
                tasks.create_task(_keep_chatting(client, url)) for _ in range(arguments.streams)
            ]
            for _ in range(ROUNDS):
                await asyncio.sleep(SETTLE_SECONDS)
                without.append(await _cpu_percent(process, arguments.seconds))
                async with _open_pages(client, url, arguments.pages, sizes):
                    await asyncio.sleep(SETTLE_SECONDS)
                    num_bytes = -sizes[0]
                    with_pages.append(await _cpu_percent(process, arguments.seconds))
                    num_bytes += sizes[0]
                print(f"CPU without pages {without[-1]:.2f} %, with pages {with_pages[-1]:.2f} %")
            for stream in streams:
                stream.cancel()
    return {
        "pages": arguments.pages,
        "cpu_percent_without_pages": round(median(without), 2),
        "cpu_percent_with_pages": round(median(with_pages), 2),
        "cpu_percent_of_pages": round(median(map(sub, with_pages, without)), 2),
        "bytes_per_page_and_second": round(num_bytes / arguments.pages / arguments.seconds),
    }


async def _cpu_percent(process: psutil.Process, seconds: float) -> float:
    """Return the CPU time that the process uses within ``seconds``, as a percentage of one core."""
    before = sum(process.cpu_times()[:2])
    await asyncio.sleep(seconds)
    return float(100 * (sum(process.cpu_times()[:2]) - before) / seconds)


@contextlib.asynccontextmanager
async def _open_pages(
    client: httpx.AsyncClient, url: str, num_pages: int, sizes: list[int]
) -> AsyncIterator[None]:
    async with asyncio.TaskGroup() as tasks:
        pages = [
            tasks.create_task(_read(client, "GET", f"{url}/admin/events", sizes))
            for _ in range(num_pages)
        ]
        yield
        for page in pages:
            page.cancel()


async def _keep_chatting(client: httpx.AsyncClient, url: str) -> None:
    """Read one answer after the other until cancelled."""
    while True:
        await _read(client, "POST", url + CHAT, json=chat(stream=True))


async def _read(
    client: httpx.AsyncClient, method: str, url: str, sizes: list[int] | None = None, **body: Any
) -> None:
    """Read a stream until cancelled. Add the sizes of its parts to ``sizes[0]``."""
    with contextlib.suppress(httpx.HTTPError):
        async with client.stream(method, url, **body) as response:
            async for part in response.aiter_raw():
                if sizes is not None:
                    sizes[0] += len(part)


if __name__ == "__main__":
    main()
