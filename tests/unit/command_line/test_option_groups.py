"""Tests dataclasses that define a command's options."""

from dataclasses import dataclass
from typing import Annotated

import typer
from typer.testing import CliRunner

from command_line.option_groups import with_option_groups


@dataclass(frozen=True, kw_only=True)
class Size:
    width: Annotated[int, typer.Option(min=1)]
    unit: Annotated[str, typer.Option("--in")] = "cm"


def run(*arguments: str) -> tuple[int, list[object]]:
    app, calls = typer.Typer(), list[object]()

    @app.command()
    @with_option_groups
    def draw(context: typer.Context, name: str, size: Size, tags: list[str] | None = None) -> None:
        """Draw a box."""
        calls.append((context.params, name, size, tags))

    return CliRunner().invoke(app, list(arguments)).exit_code, calls


def test_a_command_gets_its_groups_and_its_own_options() -> None:
    code, calls = run("box", "--width", "3", "--in", "mm", "--tags", "a", "--tags", "b")
    params = {"name": "box", "width": 3, "unit": "mm", "tags": ["a", "b"]}
    assert (code, calls) == (0, [(params, "box", Size(width=3, unit="mm"), ["a", "b"])])


def test_a_field_without_default_is_a_required_option() -> None:
    assert run("box") == (2, [])
    code, [(_, _, size, _)] = run("box", "--width", "3")  # type: ignore[misc]
    assert (code, size) == (0, Size(width=3, unit="cm"))


def test_limits_of_a_field_are_checked() -> None:
    assert run("box", "--width", "0") == (2, [])
