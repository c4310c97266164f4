"""Tests what ``baton plan --pareto`` writes: the page, the figure, deployments, and progress."""

import json
import re
from base64 import b64encode
from dataclasses import replace
from hashlib import sha256
from html.parser import HTMLParser
from pathlib import Path

import pytest

from baton.clock import ManualClock
from command_line.deployment_hint import (
    deployment_note,
    expert_note,
    helm_values,
    up_command,
)
from command_line.pareto import SweepProgress, remaining_seconds
from command_line.pareto_figure import draw_figure
from command_line.pareto_page import render_page
from simulator.parallelism import Parallelism, PoolParallelism
from tests.pareto_cases import HOSTILE, report

SLO = (2.0, 0.05)
SVG_NAMESPACE = "http://www.w3.org/2000/svg"


class ParsedPage(HTMLParser):
    """The page's elements with their attributes, and the text of each kind of element."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self._open = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self.texts.setdefault(tag, []).append("")
        self._open = tag

    def handle_endtag(self, tag: str) -> None:
        self._open = ""

    def handle_data(self, data: str) -> None:
        if self._open:
            self.texts[self._open][-1] += data


@pytest.fixture(scope="module")
def text() -> str:
    return render_page(report().as_dict(), f"{HOSTILE} on 4 × H100")


@pytest.fixture(scope="module")
def page(text: str) -> ParsedPage:
    return ParsedPage(text)


# -- the page ------------------------------------------------------------------------------


def test_page_contains_the_report(page: ParsedPage) -> None:
    data, _ = page.texts["script"]
    assert json.loads(data) == json.loads(json.dumps(report().as_dict()))


def test_names_cannot_add_elements(text: str, page: ParsedPage) -> None:
    kinds = [tag for tag, _ in page.elements]
    assert (kinds.count("script"), kinds.count("img")) == (2, 0)
    assert HOSTILE not in text
    assert page.texts["title"] == page.texts["h1"] == [f"{HOSTILE} on 4 × H100"]
    assert "\u2028" not in render_page({"name": "\u2028</SCRIPT>"}, "title")


def test_page_loads_nothing(text: str, page: ParsedPage) -> None:
    """There are no addresses but the namespace of SVG, and the policy forbids all requests."""
    assert set(re.findall(r"\w+://[^\s\"'<]*", text)) == {SVG_NAMESPACE}
    for _, attributes in page.elements:
        assert not {"src", "href", "srcset", "action", "style", "onclick", "onload"} & {*attributes}
    style, (_, script) = page.texts["style"][0], page.texts["script"]
    assert not re.search(r"url\(|@import", style)
    unsafe = r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b|fetch"
    assert not re.search(unsafe, script)
    (policy,) = (
        attributes["content"]
        for tag, attributes in page.elements
        if tag == "meta" and attributes.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy == (f"default-src 'none'; style-src {source(style)}; script-src {source(script)}")


def source(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"


# -- the figure ----------------------------------------------------------------------------


def test_figure_says_what_it_shows(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plain = replace(report(), points=report().points[:4])
    draw_figure(plain, tmp_path, "A title with $1 and $2", "seed 7 <b>")
    assert (tmp_path / "pareto.png").read_bytes().startswith(b"\x89PNG")
    drawn = (tmp_path / "pareto.svg").read_text()
    for words in ("A title with $1 and $2", "seed 7 &lt;b&gt;", "4 mixed at 10/s", "1+3 at 8/s"):
        assert words in drawn
    assert "1+3 at 12/s" not in drawn  # it misses the target
    draw_figure(plain, tmp_path, "A title with $1 and $2", "seed 7 <b>")
    assert (tmp_path / "pareto.svg").read_text() == drawn


def test_figure_without_points_says_so(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw_figure(replace(report(), points=()), tmp_path, "title", "subtitle")
    assert "No configuration meets the SLO." in (tmp_path / "pareto.svg").read_text()


# -- deployments ---------------------------------------------------------------------------


def sizes(prefill: int, decode: int) -> PoolParallelism:
    return PoolParallelism(Parallelism(prefill), Parallelism(decode))


def test_split_is_started_with_two_pools() -> None:
    workers = {"prefill": 3, "decode": 5, "mixed": 0}
    assert up_command(workers, sizes(1, 1), SLO) == (
        "baton up --model MODEL --device cuda --prefill 3 --decode 5"
    )
    assert helm_values(workers, sizes(1, 1), SLO) == (
        "pools:\n"
        "  prefill:\n    role: prefill\n    replicas: 3\n    gpu: {count: 1}\n"
        "  decode:\n    role: decode\n    replicas: 5\n    gpu: {count: 1}"
    )


def test_slo_and_several_gpus_become_settings() -> None:
    workers = {"prefill": 1, "decode": 2}
    assert up_command(workers, sizes(2, 2), (2.0, 0.02)) == (
        "baton up --model MODEL --device cuda --prefill 1 --decode 2 --engine vllm "
        "--engine-args='--tensor-parallel-size 2' --set slo_itl_seconds=0.02"
    )
    assert up_command(workers, sizes(1, 2), SLO) is None
    assert deployment_note(workers, sizes(2, 2)) is None
    assert deployment_note(workers, sizes(1, 2)) == (
        "baton up gives all workers the same number of GPUs"
    )
    assert helm_values(workers, sizes(1, 4), (1.0, 0.05)) == (
        "pools:\n"
        "  prefill:\n    role: prefill\n    replicas: 1\n    gpu: {count: 1}\n"
        "  decode:\n    role: decode\n    replicas: 2\n    gpu: {count: 4}\n"
        '    settings: {engine_args: "--tensor-parallel-size 4"}\n'
        "settings:\n  slo_ttft_seconds: 1\n  engine: vllm"
    )


def test_experts_on_all_gpus_of_a_worker_are_an_argument_of_the_engine() -> None:
    workers = {"prefill": 1, "decode": 2}
    pools = PoolParallelism(Parallelism(4, 4), Parallelism(4, 4))
    assert up_command(workers, pools, SLO) == (
        "baton up --model MODEL --device cuda --prefill 1 --decode 2 --engine vllm "
        "--engine-args='--tensor-parallel-size 4 --enable-expert-parallel'"
    )
    note = expert_note({"prefill": 0, "decode": 2}, pools)
    assert note == (
        "decode worker, EP 4: each of 4 GPUs has 1/4 of the experts, whole; tokens are sent to "
        "their experts and back"
    )
    assert expert_note(workers, sizes(4, 4)) is None
    sliced = replace(pools, prefill=Parallelism(4))
    assert deployment_note(workers, sliced) == "baton up gives all workers the same --engine-args"
    values = helm_values(workers, sliced, SLO)
    assert values is not None and values.count("--enable-expert-parallel") == 1


def test_replicated_attention_cannot_be_started() -> None:
    """If the tensor-parallel size is below the number of GPUs, no arguments of the engine help."""
    workers = {"prefill": 0, "decode": 0, "mixed": 2}
    pools = PoolParallelism(mixed=Parallelism(1, 4))
    assert up_command(workers, pools, SLO) is None
    assert helm_values(workers, pools, SLO) is None
    note = deployment_note(workers, pools)
    assert note is not None and note.startswith("EP above TP")
    assert deployment_note({**workers, "mixed": 0, "prefill": 1, "decode": 1}, pools) is None


def test_mixed_workers_take_the_place_of_pools_or_stand_beside_them() -> None:
    alone = {"prefill": 0, "decode": 0, "mixed": 4}
    assert up_command(alone, sizes(1, 1), SLO) == "baton up --model MODEL --device cuda --mixed 4"
    assert helm_values(alone, sizes(1, 1), SLO) == (
        "pools:\n  prefill: {enabled: false}\n  decode: {enabled: false}\n"
        "  mixed:\n    role: mixed\n    replicas: 4\n    gpu: {count: 1}"
    )
    beside = {"prefill": 1, "decode": 1, "mixed": 2}
    assert up_command(beside, sizes(1, 1), SLO) == (
        "baton up --model MODEL --device cuda --prefill 1 --decode 1 --mixed 2"
    )


# -- progress ------------------------------------------------------------------------------


def test_remaining_time_is_proportional() -> None:
    assert remaining_seconds(0, 10, 5.0) is None
    assert remaining_seconds(2, 10, 5.0) == 20.0
    assert remaining_seconds(10, 10, 5.0) == 0.0


def test_progress_is_shown_and_written_from_time_to_time(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Captured stderr is no terminal, so it gets a line every 10 s."""
    clock, shown = ManualClock(), list[str]()
    progress = SweepProgress(4, shown.append, clock)
    for done in range(3):
        progress(done, f"{done}+1")
        clock.advance(60.0 if done else 6.0)
    assert shown == [
        "0+1: 1 of 4",
        "1+1: 2 of 4, about 18 s left",
        "2+1: 3 of 4, about 66 s left",
    ]
    assert capsys.readouterr().err == "simulating 2+1: 3 of 4, about 66 s left\n"
