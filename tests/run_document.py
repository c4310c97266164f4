"""Run the commands of a documentation page, to check that they work.

    python -m tests.run_document [docs/operations.md]

Runs the page's code blocks that are marked ``sh local``, ``console local`` or ``python local`` in
order, each in its own shell or interpreter, which stops at the first command that fails. ``baton``
is the command in the environment of the running Python. ``$URL`` is the cluster's address, which
also replaces the default address in the page. ``make setup`` is skipped. The cluster has its own
Baton home, and is stopped at the end. Exits with 1 if a block fails."""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from baton.network.free_port import free_port

PAGE = Path(__file__).parents[1] / "docs" / "operations.md"
TOUR = PAGE.with_name("tour.md")
BLOCK = re.compile(r"^```(sh|console|python) local\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SETUP = re.compile(r"^make setup$", re.MULTILINE)
DEFAULT_URL = "http://127.0.0.1:8000"
BLOCK_SECONDS = 300
BASH = ("bash", "-euo", "pipefail", "-c")


def runnable_blocks(page: Path) -> list[tuple[str, str]]:
    """Return the language and the text of the page's code blocks that run on one machine."""
    return BLOCK.findall(page.read_text(encoding="utf-8"))


def command_line(language: str, block: str, url: str) -> list[str]:
    """Return the arguments of the process that runs a block."""
    programs = f"{Path(sys.executable).parent}/"
    script = SETUP.sub("true", block).replace(".venv/bin/", programs).replace(DEFAULT_URL, url)
    if language == "python":
        return [sys.executable, "-c", script]
    return [*BASH, script]


@contextmanager
def empty_environment() -> Iterator[dict[str, str]]:
    """Yield environment variables with a new, empty Baton home."""
    with tempfile.TemporaryDirectory(prefix="baton-") as folder:
        port = str(free_port())
        environment = {
            **inherited_environment(),
            "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}",
            "BATON_HOME": folder,
            "BATON_PORT": port,
            "URL": f"http://127.0.0.1:{port}",
        }
        try:
            yield environment
        finally:
            down = [sys.executable, "-m", "baton", "down"]
            subprocess.run(down, env=environment, capture_output=True, check=False)


def run_page(page: Path) -> str:
    """Run the page's code blocks; return the block that failed, or an empty string."""
    with empty_environment() as environment:
        blocks = [
            (block, command_line(language, block, environment["URL"]))
            for language, block in runnable_blocks(page)
        ]
        return run_blocks(blocks, environment)


def run_blocks(
    blocks: list[tuple[str, list[str]]], environment: dict[str, str], folder: Path | None = None
) -> str:
    """Run code blocks in ``folder``. Each item of ``blocks`` is a block's text and the command that
    runs it. Return the block that failed, or an empty string."""
    for block, arguments in blocks:
        print(f"$ {block}", flush=True)
        done = subprocess.run(
            arguments, cwd=folder, env=environment, timeout=BLOCK_SECONDS, check=False
        )
        print(flush=True)
        if done.returncode != 0:
            return block
    return ""


def inherited_environment() -> dict[str, str]:
    """Return this process's environment variables without Baton's."""
    return {name: value for name, value in os.environ.items() if not name.startswith("BATON_")}


def run_and_report(run: Callable[[Path], str], arguments: list[str]) -> int:
    """Call ``run`` with the documentation page that the command line names, and print whether all
    its blocks ran. Return the exit code."""
    page = Path(arguments[0]) if arguments else PAGE
    if failed := run(page):
        print(f"{page}: this failed:\n{failed}", file=sys.stderr)
        return 1
    print(f"{page}: all blocks ran")
    return 0


if __name__ == "__main__":
    sys.exit(run_and_report(run_page, sys.argv[1:]))
