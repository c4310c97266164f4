"""Prints the requirements of ``make test-python``: Baton's and those of its tests, without torch.

python -m tools.without_torch
"""

import tomllib
from pathlib import Path

LEFT_OUT = ("torch", "nixl")
OF_TESTS = (
    "anthropic", "canitoolcall", "hypothesis", "import-linter", "openai", "openapi-spec-validator",
    "promql-parser", "pytest",
)  # fmt: skip


def main() -> None:
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    own = [each for each in project["dependencies"] if not each.startswith(LEFT_OUT)]
    dev = project["optional-dependencies"]["dev"]
    print(*own, *(each for each in dev if each.startswith(OF_TESTS)), sep="\n")


if __name__ == "__main__":
    main()
