"""Tests that the commands in .github/workflows have options and targets that exist. Those of Baton
and of our tools parse their arguments, and start nothing; other programs are not looked at."""

import re
import shlex
from argparse import ArgumentParser
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml
from typer.core import TyperGroup

from command_line.main import app
from load_generator import run as load_run

ROOT = Path(__file__).parents[3]
BATON = typer.main.get_command(app)
TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))


def steps() -> Iterator[tuple[str, str]]:
    """Yield the workflow and the script of each step, with a word for what GitHub fills in."""
    for path in sorted((ROOT / ".github/workflows").glob("*.yml")):
        workflow = yaml.safe_load(path.read_text())
        for job in workflow["jobs"].values():
            matrix = job.get("strategy", {}).get("matrix", {})
            for step in job["steps"]:
                script = step.get("run", "")
                for goal in matrix.get("goal", [""]):
                    named = script.replace("${{ matrix.goal }}", goal)
                    yield path.name, re.sub(r"\$\{\{.*?\}\}", "GIVEN", named)


def commands(script: str) -> Iterator[list[str]]:
    """Yield the words of each simple command of a shell script, also of those in a container."""
    lexer = shlex.shlex(script.replace("\\\n", " ").replace("\n", " ; "), posix=True,
                        punctuation_chars=";&|")  # fmt: skip
    lexer.whitespace_split = True
    words: list[str] = []
    for word in [*lexer, ";"]:
        if not set(word) <= set(";&|"):
            words.append(word)
            continue
        if words[:2] == ["docker", "run"]:
            yield from _in_container(words)
        elif words:
            yield words
        words = []


def _in_container(words: list[str]) -> Iterator[list[str]]:
    (image,) = [index for index, word in enumerate(words) if word.endswith(":built")]
    arguments = words[image + 1 :]
    if "--entrypoint" in words:
        assert arguments[0] == "-c"
        yield from commands(arguments[1])
    else:
        yield ["baton", *arguments]  # the image's entry point


OURS = [
    (workflow, words)
    for workflow, script in steps()
    for words in commands(script)
    if Path(words[0]).name in ("baton", "make")
    or (Path(words[0]).name.startswith("python") and words[1] == "-m")
]


def command_words(context: Any) -> list[str]:
    """Return what a group has not parsed: a subcommand, and its arguments."""
    return [*context._protected_args, *context.args]


def check_baton(arguments: list[str]) -> None:
    """Parse the arguments of a command of Baton, and run only ``baton bench`` up to its load."""
    command, context = BATON, BATON.make_context("baton", list(arguments))
    while isinstance(command, TyperGroup) and (rest := command_words(context)):
        name, found, rest = command.resolve_command(context, rest)
        assert found is not None
        command, context = found, found.make_context(name, rest, parent=context)
    if context.info_name == "bench":
        command.invoke(context)


def check_make(arguments: list[str]) -> None:
    given = dict(word.split("=", 1) for word in arguments if "=" in word)
    goals = [word for word in arguments if "=" not in word]
    assert set(goals) <= TARGETS
    if "up" in goals:
        check_baton(["up", *shlex.split(given.get("ARGS", ""))])


class Parsed(Exception):
    """Raised where a tool has parsed its arguments."""


def check_module(module: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    if module == "pytest":
        assert all((ROOT / word).exists() for word in arguments if not word.startswith("-"))
        return
    parse = ArgumentParser.parse_args

    def stop(self: ArgumentParser, *given: Any) -> None:
        parse(self, *given)
        raise Parsed

    monkeypatch.setattr("sys.argv", [module, *arguments])
    monkeypatch.setattr(ArgumentParser, "parse_args", stop)
    with pytest.raises(Parsed):
        import_module(module).main()


@pytest.mark.parametrize(
    ("workflow", "words"), OURS, ids=lambda each: each if isinstance(each, str) else " ".join(each)
)
def test_the_arguments_of_our_commands_in_workflows_are_valid(
    workflow: str, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load_run, "run_bench", lambda config: None)
    program, *arguments = words
    match Path(program).name:
        case "baton":
            check_baton(arguments)
        case "make":
            check_make(arguments)
        case _:
            check_module(arguments[1], arguments[2:], monkeypatch)


def test_the_commands_of_workflows_are_found() -> None:
    found = {" ".join(words[:2]) for _, words in OURS}
    assert {"baton generate", "baton up", "baton bench", "baton down", "make test"} <= found
    assert {"python3 -m", "python -m", "make check", ".venv/bin/baton doctor"} <= found
