"""The sources of settings besides flags: the environment, a folder of secret files, a YAML file.

This module checks the names of environment variables; pydantic reads their values.
"""

import difflib
import ipaddress
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml
from pydantic_settings import PydanticBaseSettingsSource

from baton.config.config_version import without_newer_settings
from baton.config.setting_warning import OnWarning
from baton.errors import Invalid
from baton.system.process_environment import (
    CONFIG_ENVIRONMENT_VARIABLE,
    ENVIRONMENT_PREFIX,
    SECRETS_ENVIRONMENT_VARIABLE,
    settings_variables,
)

_URL = re.compile(r"(tcp|udp|sctp)://(?P<host>[^/]+):(?P<port>[0-9]+)")


def _is_address(value: str) -> bool:
    try:
        ipaddress.ip_address(value)
    except ValueError:
        return False
    return True


def _is_port(value: str) -> bool:
    return value.isascii() and value.isdecimal() and 0 < int(value) < 65536


def _is_url(value: str) -> bool:
    match = _URL.fullmatch(value)
    if match is None or not _is_port(match["port"]):
        return False
    host = match["host"]
    return _is_address(host[1:-1] if host.startswith("[") and host.endswith("]") else host)


_SHAPES: Mapping[re.Pattern[str], Callable[[str], bool]] = MappingProxyType({
    re.compile(f"[A-Z][A-Z0-9_]*_{suffix}"): is_valid
    for suffix, is_valid in {
        "SERVICE_HOST": _is_address,
        "SERVICE_PORT(_[A-Z0-9_]+)?": _is_port,
        "PORT": _is_url,
        "PORT_[0-9]+_(TCP|UDP|SCTP)": _is_url,
        "PORT_[0-9]+_(TCP|UDP|SCTP)_PROTO": ("tcp", "udp", "sctp").__contains__,
        "PORT_[0-9]+_(TCP|UDP|SCTP)_PORT": _is_port,
        "PORT_[0-9]+_(TCP|UDP|SCTP)_ADDR": _is_address,
    }.items()
})  # fmt: skip


def is_service_variable(variable: str, value: str) -> bool:
    """Whether name and value of the variable are those of one that Kubernetes sets."""
    return any(name.fullmatch(variable) and is_valid(value) for name, is_valid in _SHAPES.items())


MAX_CONFIG_BYTES = 2**20
"""The size limit of a config file, which running programs read every few seconds. A ConfigMap has
the same limit."""

QUOTED = re.compile(r"(['\"])(?:(?!\1).)*\1")

LONGEST_SECRET_BYTES = 64 * 1024
"""The size limit of a secret file: enough for many API keys. A larger file is in the folder by
mistake."""


@dataclass(frozen=True, slots=True)
class SettingsFiles:
    """The settings in the config file and in the folder of secret files."""

    config: Mapping[str, Any]
    secrets: Mapping[str, str]


_files: ContextVar[SettingsFiles] = ContextVar("settings_files")
"""What :class:`SecretFiles` and :class:`ConfigFile` return; unset where settings are built without
files."""
_NO_FILES = SettingsFiles({}, {})


class SecretFiles(PydanticBaseSettingsSource):
    """Settings source for the files in the folder named by ``BATON_SECRETS_DIRECTORY``, as read by
    :func:`read_files`."""

    def get_field_value(self, field: Any, field_name: str) -> tuple[Any, str, bool]:
        return None, field_name, False

    def __call__(self) -> dict[str, Any]:
        return dict(_files.get(_NO_FILES).secrets)


class ConfigFile(PydanticBaseSettingsSource):
    """Settings source for the YAML file named by ``BATON_CONFIG``, as read by
    :func:`read_files`."""

    def get_field_value(self, field: Any, field_name: str) -> tuple[Any, str, bool]:
        return None, field_name, False

    def __call__(self) -> dict[str, Any]:
        return dict(_files.get(_NO_FILES).config)


def read_files(known: Collection[str], warn: OnWarning, content: bytes | None) -> SettingsFiles:
    """Read the config file and the folder of secret files that the environment names. If
    ``content`` is not None, it is used as the config file's content. Raises Invalid if a file can't
    be read or has an unknown setting."""
    config = read_config_file(os.environ.get(CONFIG_ENVIRONMENT_VARIABLE), known, warn, content)
    secrets = read_secret_files(os.environ.get(SECRETS_ENVIRONMENT_VARIABLE), known)
    return SettingsFiles(config, secrets)


@contextmanager
def use_files(files: SettingsFiles) -> Iterator[None]:
    """Context manager: within the ``with`` block, settings are built from ``files`` besides flags
    and the environment."""
    token = _files.set(files)
    try:
        yield
    finally:
        _files.reset(token)


def read_config_file(
    path: str | None, known: Collection[str], warn: OnWarning, content: bytes | None
) -> dict[str, Any]:
    """Return the settings in a YAML file. If ``content`` is given, it is parsed instead of the
    file. If the file was written for a newer version of Baton, settings that are not in ``known``
    are left out, with a warning (:mod:`baton.config.config_version`); otherwise, Invalid is raised.
    Also raises Invalid if the file can't be read or is not a mapping. Error messages may name an
    unknown setting, but never show a value, which may be secret."""
    if not path:
        return {}
    where = f"config file {path}"
    values = _parse_yaml(read_config_bytes(path) if content is None else content, where)
    if not isinstance(values, dict):
        raise Invalid(f"{where}: the file must be a mapping of settings")
    values = without_newer_settings(values, known, where, warn)
    for name in values:
        check_name(str(name), known, where)
    return values


def read_config_bytes(path: str) -> bytes:
    """Return the content of the config file. Raises Invalid if it can't be read or is too large."""
    where = f"config file {path}"
    try:
        with Path(path).open("rb") as file:
            content = file.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise Invalid(f"{where}: {error}") from error
    if len(content) > MAX_CONFIG_BYTES:
        raise Invalid(f"{where}: the file has more than {MAX_CONFIG_BYTES} bytes")
    return content


def _parse_yaml(content: bytes, where: str) -> Any:
    """Parse YAML. An empty file counts as an empty mapping. Raises Invalid for malformed YAML."""
    try:
        return yaml.safe_load(content.decode()) or {}
    except UnicodeDecodeError:
        raise Invalid(f"{where}: the file is not UTF-8 text") from None
    except yaml.YAMLError as error:  # as text, it shows lines of the file
        raise Invalid(f"{where}: {_yaml_problem(error)}") from None
    except ValueError:
        raise Invalid(
            f"{where}: the file has an invalid number or date; if it is meant as text, quote it"
        ) from None
    except RecursionError:
        raise Invalid(f"{where}: the file is nested too deeply") from None


def _yaml_problem(error: yaml.YAMLError) -> str:
    """Describe what is wrong with the YAML, and where, without showing a value, which may be
    secret. PyYAML's message quotes the names of tags and anchors, and PyYAML takes a value that
    starts with ``!`` or ``*`` for such a name; so quoted names are left out."""
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return "has characters that YAML does not allow"
    mark = error.problem_mark
    problem = QUOTED.sub(lambda found: _without_name(found[0]), error.problem or "malformed YAML")
    return f"{problem} (line {mark.line + 1}, column {mark.column + 1})"


def _without_name(quoted: str) -> str:
    """Return three dots in place of ``quoted``, a quoted part of PyYAML's message, which may be a
    secret. Return it unchanged if it is a single character or a kind of token (``'<block end>'``),
    which can't be secret."""
    return quoted if len(quoted) == 3 or quoted.startswith("'<") else "..."


def read_secret_files(folder: str | None, known: Collection[str]) -> dict[str, str]:
    """Read a folder that has one file per setting, named like the setting; a line break at the end
    is not part of the value. Hidden files are ignored, because Kubernetes keeps a volume's versions
    in them. Raises Invalid if a file can't be read or its name is not in ``known``; the message
    never shows a part of a value."""
    if not folder:
        return {}
    where = f"secrets directory {folder}"
    values = {}
    try:
        paths = sorted(each for each in Path(folder).iterdir() if not each.name.startswith("."))
        for path in paths:
            check_name(path.name, known, where)
            if path.stat().st_size > LONGEST_SECRET_BYTES:
                raise Invalid(f"{where}: {path.name} has more than {LONGEST_SECRET_BYTES} bytes")
            values[path.name] = path.read_text(encoding="utf-8").rstrip("\r\n")
    except UnicodeDecodeError:  # the error would show the file's content
        raise Invalid(f"{where}: {path.name} is not UTF-8 text") from None
    except OSError as error:
        raise Invalid(f"{where}: {error}") from error
    return values


def environment_values() -> dict[str, str]:
    """Return the values of this process's ``BATON_…`` variables, keyed by the setting's name,
    without those that Kubernetes sets for Services."""
    return {
        variable.removeprefix(ENVIRONMENT_PREFIX).lower(): value
        for variable, value in settings_variables().items()
        if not is_service_variable(variable, value)
    }


def variable_name(name: str) -> str:
    """Return the environment variable of the setting ``name``."""
    return ENVIRONMENT_PREFIX + name.upper()


def check_environment(known: Collection[str]) -> None:
    """Raise Invalid if a ``BATON_…`` variable is not one of the ``known`` settings."""
    for name in environment_values():
        check_name(name, known, f"environment variable {variable_name(name)}")


def check_name(name: str, known: Collection[str], where: str) -> None:
    """Raise Invalid, with a suggestion, if ``name`` is not in ``known``."""
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise Invalid(f"{where}: there is no setting {name!r}{hint}")
