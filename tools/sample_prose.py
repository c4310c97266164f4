"""Draw docstrings, error messages and log lines at random for a reader who checks their wording.

    python -m tools.sample_prose [--seed N] [--count 60] [FOLDER …]

Prints each text with its file, its line and the name of what it belongs to. The same seed and
commit give the same texts; without ``--seed``, a random seed is used and printed.
"""

import argparse
import ast
import secrets
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[1]
FOLDERS = (
    "baton", "router", "conductor", "prefill_worker", "decode_worker", "kvstore", "simulator",
    "orchestrator", "load_generator", "command_line", "tools", "benchmarks", "tests",
)  # fmt: skip
GENERATED = "baton/rpc/v1"
LOG_METHODS = {"debug", "info", "warning", "error", "exception"}
DEFINITIONS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Text:
    """One text. ``subject`` is the function, class or module that a docstring describes, the class
    of a raised error, or "log"."""

    kind: str
    path: Path
    line: int
    subject: str
    words: str


def texts_of(path: Path) -> Iterator[Text]:
    """Yield the docstrings, messages of raised errors and log lines of one file."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, DEFINITIONS):
            words = ast.get_docstring(node)
            name = getattr(node, "name", path.stem)
            if words:
                yield Text("docstring", path, getattr(node, "lineno", 1), name, words)
        elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            words = " ".join(filter(None, map(_shown, node.exc.args)))
            if " " in words:
                yield Text("error", path, node.lineno, ast.unparse(node.exc.func), words)
        elif isinstance(node, ast.Call) and _is_log_call(node):
            yield Text("log", path, node.lineno, "log", ast.unparse(node))


def _shown(node: ast.expr) -> str:
    """Return the text of a literal or an f-string, with "…" for each placeholder."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        parts = [p.value if isinstance(p, ast.Constant) else "…" for p in node.values]
        return "".join(map(str, parts))
    return ""


def _is_log_call(node: ast.Call) -> bool:
    function = node.func
    return (
        isinstance(function, ast.Attribute)
        and function.attr in LOG_METHODS
        and isinstance(function.value, ast.Name)
        and function.value.id == "log"
    )


def draw(folders: Sequence[str], count: int, seed: int) -> list[Text]:
    paths = sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    kept = [path for path in paths if GENERATED not in path.as_posix()]
    texts = [text for path in kept for text in texts_of(path)]
    order = np.random.default_rng(seed).permutation(len(texts))
    return [texts[index] for index in order[:count]]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="*", default=FOLDERS)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--count", type=int, default=60)
    options = parser.parse_args(arguments)
    seed = secrets.randbits(32) if options.seed is None else options.seed
    print(f"seed {seed}\n")
    for text in draw(options.folders, options.count, seed):
        print(f"[{text.kind}] {text.path.relative_to(ROOT)}:{text.line} {text.subject}")
        print("    " + "\n    ".join(text.words.splitlines()) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
