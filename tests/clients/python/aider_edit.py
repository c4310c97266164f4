"""Lets aider edit a file, and asks it for more than the model's context has room for."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from cases import MODEL, URL, run

EDIT_QUESTION = "Write a greeting."
OPTIONS = (
    "--no-git --yes-always --no-auto-lint --no-check-update --no-show-model-warnings "
    "--no-analytics --no-pretty --no-detect-urls --no-gitignore --edit-format whole --map-tokens 0"
)


def aider(message: str, folder: str) -> str:
    """Run aider once for ``greeting.txt`` in the folder; return what it prints."""
    (Path(folder) / "message").write_text(message)
    prices = Path(folder) / ".aider" / "caches" / "model_prices_and_context_window.json"
    prices.parent.mkdir(parents=True)
    prices.write_text(json.dumps({"other": {}}))  # otherwise it asks for them in the network
    finished = subprocess.run(
        [
            str(Path(sys.executable).with_name("aider")),
            *OPTIONS.split(),
            *("--model", f"openai/{MODEL}"),
            *("--openai-api-base", f"{URL}/v1", "--openai-api-key", "none"),
            *("--message-file", "message", "greeting.txt"),
        ],
        cwd=folder,
        env={**os.environ, "HOME": folder},
        capture_output=True,
        text=True,
        check=False,
    )
    return finished.stdout + finished.stderr


def edit() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "greeting.txt").write_text("Hi\n")
        printed = aider(EDIT_QUESTION, folder)
        return [(Path(folder) / "greeting.txt").read_text(), "Applied edit" in printed]


def overflow() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "greeting.txt").write_text("Hi\n")
        printed = aider("word " * 140_000 + EDIT_QUESTION, folder)
        return ["has hit a token limit!" in printed, (Path(folder) / "greeting.txt").read_text()]


run({"edit": edit, "overflow": overflow})
