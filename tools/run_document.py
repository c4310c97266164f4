"""Run the commands of a documentation page, to check that they work.

    python -m tools.run_document [docs/operations.md]

Runs the page's code blocks that are marked ``sh local`` in order, each in its own shell, which
stops at the first command that fails. ``baton`` is the one of this Python's environment, ``$URL``
the cluster's address. The cluster has its own Baton home, and is stopped at the end. Exit code 1
when a block fails."""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from orchestrator.preflight import free_port

PAGE = Path(__file__).parents[1] / "docs" / "operations.md"
BLOCK = re.compile(r"^```sh local\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCK_SECONDS = 300


def runnable_blocks(page: Path) -> list[str]:
    """Return the page's code blocks that run on one machine."""
    return BLOCK.findall(page.read_text(encoding="utf-8"))


@contextmanager
def empty_environment() -> Iterator[dict[str, str]]:
    """Yield the environment of a reader with a new, empty Baton home."""
    with tempfile.TemporaryDirectory(prefix="baton-") as folder:
        port = str(free_port())
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("BATON_")},
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
    """Run the page's code blocks; return the one that failed, or an empty text."""
    with empty_environment() as environment:
        for block in runnable_blocks(page):
            print(f"$ {block}", flush=True)
            shell = ["bash", "-euo", "pipefail", "-c", block]
            done = subprocess.run(shell, env=environment, timeout=BLOCK_SECONDS, check=False)
            print(flush=True)
            if done.returncode != 0:
                return block
    return ""


def main(arguments: list[str]) -> int:
    page = Path(arguments[0]) if arguments else PAGE
    failed = run_page(page)
    if failed:
        print(f"{page}: this failed:\n{failed}", file=sys.stderr)
        return 1
    print(f"{page}: {len(runnable_blocks(page))} runnable_blocks ran")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
