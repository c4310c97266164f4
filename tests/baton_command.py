"""Runs ``baton`` commands in the process of the tests."""

import sys
from collections.abc import Callable

import pytest

from command_line.main import run_command_line

Ask = Callable[..., tuple[int, str, str]]


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Ask:
    """Run ``baton …`` in this process; return its exit code, stdout and stderr."""

    def run_command(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["baton", *arguments])
        with pytest.raises(SystemExit) as ended:
            run_command_line()
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return run_command
