"""Measures in the browser how long the console takes to render, and how smoothly it scrolls."""

from typing import Any

from playwright.sync_api import Page

RECORD_RENDER = """
const look = () => {
  if (document.querySelector('tr.row')) window.renderedAt = performance.now();
  else requestAnimationFrame(look);
};
requestAnimationFrame(look);
"""

SCROLL = """async () => {
  const frame = document.querySelector('.table-frame');
  const times = [];
  let last = performance.now();
  for (let step = 1; step <= 120; step += 1) {
    frame.scrollTop += 90;
    await new Promise(requestAnimationFrame);
    const now = performance.now();
    times.push(now - last);
    last = now;
  }
  times.sort((a, b) => a - b);
  const at = (share) => times[Math.ceil(share * times.length) - 1];
  return { p50: at(0.5), p95: at(0.95), max: at(1), top: frame.scrollTop };
}"""


def measure_render_milliseconds(page: Page, url: str) -> float:
    """Open the table of workers. Return the milliseconds from the start of the navigation until
    its rows are there."""
    page.add_init_script(RECORD_RENDER)
    page.goto(f"{url}/ui#/workers")
    page.locator("tr.row").first.wait_for()
    return float(page.evaluate("new Promise(requestAnimationFrame).then(() => window.renderedAt)"))


def measure_scroll(page: Page) -> dict[str, Any]:
    """Scroll the table by 120 steps of 90 pixels. Return the times between the browser's frames in
    milliseconds (``p50``, ``p95``, ``max``), and how far the table was scrolled (``top``)."""
    result: dict[str, Any] = page.evaluate(SCROLL)
    return result
