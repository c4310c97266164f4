"""Tests that, before `baton up` starts any process, it checks whether engine vllm can run."""

import stat
import sys
from pathlib import Path

import pytest

from baton.config import Settings
from baton.errors import Invalid
from orchestrator import engine_probe
from orchestrator.backends import check_models


def refusal(python: str) -> Invalid:
    with pytest.raises(Invalid) as refused:
        check_models(Settings(engine="vllm", engine_python=python))
    assert refused.value.param == "engine_python"
    assert "\n" not in str(refused.value)
    return refused.value


def program(folder: Path, text: str) -> str:
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_the_models_of_batons_own_engine_need_no_other_python() -> None:
    check_models(Settings(engine="baton", engine_python="/nowhere/python"))


def test_a_python_with_vllm_is_accepted(tmp_path: Path) -> None:
    python = program(tmp_path, "exit 0")
    check_models(Settings(engine="vllm", engine_python=python))


def test_a_missing_python_is_refused() -> None:
    assert str(refusal("/nowhere/python")).startswith(
        "engine_python is '/nowhere/python': [Errno 2] No such file or directory"
    )


def test_a_python_without_vllm_is_refused() -> None:
    assert str(refusal(sys.executable)) == (
        f"engine is vllm, but {sys.executable} has no vLLM: set engine_python to the Python of an "
        "environment that has it"
    )


def test_a_python_that_hangs_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_probe, "PROBE_SECONDS", 0.1)
    assert "timed out after 0.1 seconds" in str(refusal(program(tmp_path, "exec sleep 60")))
