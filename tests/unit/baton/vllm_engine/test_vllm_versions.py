"""Tests that only known versions of vLLM are accepted, and that the error says what to do if vLLM
is not installed."""

import subprocess
import sys
from importlib.metadata import PackageNotFoundError

import pytest

from baton.errors import Invalid
from baton.vllm_engine import versions


def install(monkeypatch: pytest.MonkeyPatch, version: str | None) -> None:
    def installed(name: str) -> str:
        assert name == "vllm"
        if version is None:
            raise PackageNotFoundError(name)
        return version

    monkeypatch.setattr(versions, "version", installed)


@pytest.mark.parametrize("installed", ["0.32.0", "0.32.0+cpu", "0.32.0+cu130"])
def test_known_versions_are_accepted(monkeypatch: pytest.MonkeyPatch, installed: str) -> None:
    install(monkeypatch, installed)
    assert versions.check_vllm_version() == "0.32.0"


@pytest.mark.parametrize("installed", ["0.31.9", "0.32.1", "0.32.0rc1", "1.0"])
def test_unknown_versions_are_refused(monkeypatch: pytest.MonkeyPatch, installed: str) -> None:
    install(monkeypatch, installed)
    with pytest.raises(Invalid) as refused:
        versions.check_vllm_version()
    assert str(refused.value) == (
        f"vLLM {installed} is installed, but this version of Baton supports only 0.32.0"
    )
    assert refused.value.param == "engine"


def test_missing_vllm_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, None)
    with pytest.raises(Invalid, match="this Python has no vLLM: set engine_python") as refused:
        versions.check_vllm_version()
    assert refused.value.param == "engine_python"


def test_the_module_prints_one_line_where_there_is_no_vllm() -> None:
    command = [sys.executable, "-m", "baton.vllm_engine.versions"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("engine is vllm, but this Python has no vLLM")
    assert done.stderr.count("\n") == 1
