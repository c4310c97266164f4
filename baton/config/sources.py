"""Where settings come from besides flags: the environment and a YAML file.

The environment is checked by name here and read by pydantic, except for the old names of settings
(:mod:`baton.config.renamed_settings`), which pydantic doesn't know.
"""

import difflib
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

import yaml
from pydantic_settings import PydanticBaseSettingsSource

from baton.config.renamed_settings import RENAMED_SETTINGS, use_new_names
from baton.errors import Invalid

ENVIRONMENT_PREFIX = "BATON_"
CONFIG_ENVIRONMENT_VARIABLE, HOME_ENVIRONMENT_VARIABLE = "BATON_CONFIG", "BATON_HOME"


class RenamedVariables(PydanticBaseSettingsSource):
    """Settings source of the environment variables that have a setting's old name."""

    def get_field_value(self, field: Any, field_name: str) -> tuple[Any, str, bool]:
        return None, field_name, False

    def __call__(self) -> dict[str, Any]:
        values = environment_values()
        renamed = use_new_names(values, "environment", variable_name)
        return {
            new: renamed[new]
            for old, new in RENAMED_SETTINGS.items()
            if old in values and new in self.settings_cls.model_fields
        }


class ConfigFile(PydanticBaseSettingsSource):
    """Settings source that reads the YAML file named by ``BATON_CONFIG``."""

    def get_field_value(self, field: Any, field_name: str) -> tuple[Any, str, bool]:
        return None, field_name, False

    def __call__(self) -> dict[str, Any]:
        path = os.environ.get(CONFIG_ENVIRONMENT_VARIABLE)
        values = read_config_file(path, self.settings_cls.model_fields)
        return use_new_names(values, f"config file {path}", str)


def read_config_file(path: str | None, known: Collection[str]) -> dict[str, Any]:
    """Read a YAML file of settings; its names may be old ones. Raises Invalid if it can't be read,
    is not a mapping, or has keys that are not in ``known``."""
    if not path:
        return {}
    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise Invalid(f"config file {path}: {error}") from error
    if not isinstance(values, dict):
        raise Invalid(f"config file {path}: must be a mapping of settings")
    for name in values:
        check_name(str(name), known, f"config file {path}")
    return values


def environment_values() -> dict[str, str]:
    """Return the values of this process's ``BATON_…`` variables, keyed by the setting's name."""
    return {
        variable.removeprefix(ENVIRONMENT_PREFIX).lower(): value
        for variable, value in os.environ.items()
        if variable.startswith(ENVIRONMENT_PREFIX)
        and variable not in (CONFIG_ENVIRONMENT_VARIABLE, HOME_ENVIRONMENT_VARIABLE)
    }


def variable_name(name: str) -> str:
    """Return the environment variable of the setting ``name``."""
    return ENVIRONMENT_PREFIX + name.upper()


def check_environment(known: Collection[str]) -> None:
    """Raise Invalid if a ``BATON_…`` variable is not one of the ``known`` settings."""
    for name in environment_values():
        check_name(name, known, f"environment variable {variable_name(name)}")


def check_name(name: str, known: Collection[str], where: str) -> None:
    """Raise Invalid, with a suggestion, if ``name`` is neither in ``known`` nor an old name of a
    setting."""
    if name not in known and name not in RENAMED_SETTINGS:
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise Invalid(f"{where}: there is no setting {name!r}{hint}")
