"""Helpers for tests of settings, which remove all settings from the environment and write config
files."""

import os
from pathlib import Path

import pytest


def remove_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove all ``BATON_…`` variables from the environment until the test ends."""
    for name in list(os.environ):
        if name.startswith("BATON_"):
            monkeypatch.delenv(name)
    # load_settings() sets BATON_CONFIG for later readers; this is undone after each test.
    monkeypatch.setenv("BATON_CONFIG", "")


def write(folder: Path, text: str) -> Path:
    file = folder / "baton.yaml"
    file.write_text(text)
    return file
