"""Tests that fully qualified names in docstrings refer to things that exist."""

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[3]
PACKAGES = (
    "baton", "router", "conductor", "prefill_worker", "decode_worker", "kvstore", "simulator",
    "orchestrator", "load_generator", "command_line", "tools", "benchmarks", "tests",
)  # fmt: skip
NAME = rf"(?:{'|'.join(PACKAGES)})(?:\.\w+)+"
REFERENCE = re.compile(rf":(?:mod|class|func|meth|data|attr):`~?({NAME})`")


def test_qualified_names_in_docstrings_exist() -> None:
    missing = [
        f"{path.relative_to(ROOT)}: {name}"
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        for name in REFERENCE.findall(path.read_text())
        if not exists(name)
    ]
    assert missing == []


@cache
def exists(name: str) -> bool:
    """Return whether ``name`` is a module, a name in a module, or a member of a class in a
    module."""
    parts = name.split(".")
    for num_parts in range(len(parts), 0, -1):
        names = names_of("/".join(parts[:num_parts]))
        if names is not None:
            return num_parts == len(parts) or ".".join(parts[num_parts:]) in names
    return False


@cache
def names_of(module: str) -> frozenset[str] | None:
    """Return the names that ``module`` defines (functions, classes and their members, constants,
    imports), or None if there is no such module."""
    for path in (ROOT / f"{module}.py", ROOT / module / "__init__.py"):
        if path.exists():
            return frozenset(defined(ast.parse(path.read_text()).body))
    return None


def defined(body: list[ast.stmt], prefix: str = "") -> set[str]:
    names: set[str] = set()
    for node in body:
        if isinstance(node, ast.ClassDef):
            names |= {prefix + node.name} | defined(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(prefix + node.name)
        elif isinstance(node, ast.ImportFrom | ast.Import):
            names |= {prefix + (alias.asname or alias.name) for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {prefix + target.id for target in targets if isinstance(target, ast.Name)}
    return names
