"""Loads the settings, checks the names and values from all sources, and explains errors."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from baton.config.renamed_settings import rename_warnings, use_new_names
from baton.config.settings import SECRET_SETTINGS, Settings
from baton.config.sources import (
    CONFIG_ENVIRONMENT_VARIABLE,
    check_environment,
    check_name,
    environment_values,
    read_config_file,
)
from baton.config.validation import check_combinations, check_exposure, check_private_network
from baton.errors import Invalid


def print_warning(message: str) -> None:
    print(f"baton: warning: {message}", file=sys.stderr)


def load_settings(
    config: Path | None = None, warn: Callable[[str], None] = print_warning, **flags: Any
) -> Settings:
    """Load the settings from all sources. A flag that is None counts as not given. ``warn`` gets a
    message for each old name of a setting that a source uses. Raises Invalid."""
    if config is not None:
        os.environ[CONFIG_ENVIRONMENT_VARIABLE] = str(config)
    given = {name: value for name, value in flags.items() if value is not None}
    for message in rename_warnings(_check_names(given)):
        warn(message)
    given = use_new_names(given, "command line", str)
    try:
        settings = Settings(**given)
    except ValidationError as error:
        raise Invalid(_explain(error)) from error
    check_exposure(settings)
    check_private_network(settings)
    check_combinations(settings)
    return settings


def _check_names(flags: dict[str, Any]) -> list[str]:
    """Return the names of the settings that all sources give. Raises Invalid for unknown ones."""
    known = Settings.model_fields
    for name in flags:
        check_name(name, known, "command line")
    check_environment(known)
    file = read_config_file(os.environ.get(CONFIG_ENVIRONMENT_VARIABLE), known)
    return [*flags, *environment_values(), *map(str, file)]


def _explain(error: ValidationError) -> str:
    """Describe each wrong setting: its name, its value, and what would be valid."""
    lines = []
    for problem in error.errors():
        parts = [str(part) for part in problem["loc"]] or ["settings"]
        is_secret = parts[0] in SECRET_SETTINGS
        name = parts[0] if is_secret else ".".join(parts)
        shown = "wrong" if is_secret else repr(problem.get("input"))
        message = problem["msg"].removeprefix("Value error, ")
        lines.append(f"{name} is {shown}: {message[0].lower()}{message[1:]}")
    return "; ".join(lines)
