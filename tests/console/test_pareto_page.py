"""Tests the page of ``baton plan --pareto`` in a browser, opened as a file."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from command_line.pareto_page import render_page
from tests.console.browser import open_page
from tests.pareto_cases import HOSTILE, report

REPORT = report()


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pareto") / "pareto.html"
    path.write_text(render_page(REPORT.as_dict(), f"{HOSTILE} on 4 × H100"), encoding="utf-8")
    return path


@pytest.fixture(params=["light", "dark"])
def pareto(browser: Browser, file: Path, request: pytest.FixtureRequest) -> Iterator[Page]:
    """The page without a network, in each color scheme."""
    with open_page(browser, color_scheme=request.param, offline=True) as page:
        page.goto(file.as_uri())
        yield page


def shown(points: Locator) -> list[int]:
    """Return the indices of these points in the report."""
    return sorted(int(each.get_attribute("data-index") or -1) for each in points.all())


def test_clicked_point_shows_its_configuration(pareto: Page) -> None:
    details = pareto.get_by_label("The chosen point")
    expect(details).to_contain_text("Choose a point")
    pareto.get_by_role("button", name="1+3 at 8 requests/s").click()
    expect(details.get_by_role("heading", level=2)).to_contain_text("1+3 at 8 requests/s")
    expect(details).to_contain_text("1 prefill, 3 decode")
    expect(details).to_contain_text("baton up --prefill 1 --decode 3")
    expect(pareto.locator(".point.chosen")).to_have_count(1)


def test_outlined_points_are_the_reports_frontier(pareto: Page) -> None:
    slo = pareto.get_by_label("SLO", exact=True)
    for number in range(len(REPORT.slos)):
        slo.select_option(str(number))
        figures = [point.by_slo[number] for point in REPORT.points]
        expected = [index for index, each in enumerate(figures) if each.on_frontier]
        assert shown(pareto.locator(".point.optimal")) == expected
        assert shown(pareto.locator(".point")) == [
            index for index, each in enumerate(figures) if each.meets_target
        ]


def test_kinds_misses_and_axes_are_chosen(pareto: Page) -> None:
    pareto.get_by_label("points that miss the SLO").check()
    assert shown(pareto.locator(".point")) == [0, 1, 2, 3, 4]
    assert shown(pareto.locator(".point.missed")) == [3]
    pareto.get_by_label("● mixed").uncheck()
    pareto.get_by_label("◆ other").uncheck()
    assert shown(pareto.locator(".point")) == [2, 3]
    pareto.get_by_label("$ per million tokens").check()
    expect(pareto.get_by_role("button", name="1.25 $ per million tokens")).to_have_count(1)
    pareto.get_by_label("kWh per million tokens").check()
    expect(pareto.get_by_role("button", name="0.25 kWh per million tokens")).to_have_count(1)


def test_keyboard_reaches_and_chooses_points(pareto: Page) -> None:
    """Points have one tab stop; arrows move from slow to fast."""
    pareto.get_by_label("points that miss the SLO").focus()
    pareto.keyboard.press("Tab")
    focused = pareto.locator(".point:focus")
    assert shown(focused) == [0]
    expect(pareto.locator("#tip")).to_contain_text("4 mixed at 10 requests/s")
    pareto.keyboard.press("ArrowRight")
    assert shown(focused) == [1]
    pareto.keyboard.press("End")
    assert shown(focused) == [4]
    pareto.keyboard.press("ArrowLeft")
    pareto.keyboard.press("Enter")
    assert shown(pareto.locator(".point.chosen")) == [2]
    pareto.keyboard.press("Tab")
    expect(pareto.get_by_role("button", name="Copy: Start it")).to_be_focused()


def test_names_are_shown_and_not_run(pareto: Page) -> None:
    pareto.locator("tbody button").last.click()
    expect(pareto.get_by_label("The chosen point").locator("pre").first).to_have_text(HOSTILE)
    expect(pareto.get_by_role("heading", level=1)).to_contain_text("<img src=x")
    assert pareto.evaluate("window.injected") is None
